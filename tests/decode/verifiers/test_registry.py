"""Verifiers by name, and what is said to names and bounds that make no sense."""

import pytest

from forerun.decode.verifiers import LOSSLESS, LOSSY, make_verifier
from forerun.errors import BadRequest
from forerun.params import Speculation


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_ones_take_no_bound(name):
    verifier = make_verifier(Speculation(verify=name))
    assert verifier.name == name and verifier.lossless
    with pytest.raises(BadRequest, match=r"0\.2") as error:
        make_verifier(Speculation(verify=name, bound=0.2))
    assert "typical" in error.value.hint


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_ones_need_one(name):
    verifier = make_verifier(Speculation(verify=name, bound=0.2))
    assert verifier.name == name and not verifier.lossless
    with pytest.raises(BadRequest) as error:
        make_verifier(Speculation(verify=name))
    assert "give a bound" in error.value.hint


def test_auto_answers_as_plain_decoding_does():
    assert make_verifier(Speculation()).name == "match"


def test_an_unknown_name_gets_the_list():
    with pytest.raises(BadRequest, match="'best'") as error:
        make_verifier(Speculation(verify="best"))
    assert all(name in error.value.hint for name in (*LOSSLESS, *LOSSY))
