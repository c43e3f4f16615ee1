"""The container: what is written is read, and damaged files are clear errors wherever the damage is."""

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from forerun.errors import CorruptModel, UnsupportedModel
from forerun.models.formats.gguf import GGUFFile


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("flag", True)
    writer.add_array("words", ["a", "", "日本", "x" * 300])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("one", np.arange(8, dtype=np.float32).reshape(2, 4))
    writer.add_tensor("two", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_was_written(small: Path) -> None:
    file = GGUFFile(small)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3 and file.metadata["llama.eps"] == 0.5
    assert file.metadata["flag"] is True and file.metadata["numbers"] == [1, 2, 3]
    assert file.metadata["words"] == ["a", "", "日本", "x" * 300]
    assert file.tensors["one"].shape == (2, 4) and file.tensors["two"].shape == (5,)
    assert file.raw("one").view(-1).numpy().view(np.float32).tolist() == list(range(8))
    file.release()
    assert file.raw("two").view(-1).numpy().view(np.float32).tolist() == list(range(5))


def test_every_truncation_is_an_error(small: Path, tmp_path: Path) -> None:
    """Cut at every length from nothing to one byte short: header, metadata, tensor table and data."""
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    end = max(info.offset + info.nbytes for info in GGUFFile(small).tensors.values())  # padding may follow
    for length in range(end):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptModel) as caught:
            GGUFFile(cut)
        assert caught.value.hint
    cut.write_bytes(whole[:end])
    assert set(GGUFFile(cut).tensors) == {"one", "two"}


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(CorruptModel, match="starts with b'PK"):
        GGUFFile(path)


@pytest.mark.parametrize(("version", "message"), [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")])
def test_wrong_version(small: Path, version: int, message: str) -> None:
    data = bytearray(small.read_bytes())
    data[4:8] = struct.pack("<I", version)
    small.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=message):
        GGUFFile(small)


@pytest.mark.parametrize("count", [2**40, 2**63, 2**64 - 1])
def test_absurd_counts(small: Path, count: int) -> None:
    """Counts that no file could hold end at once, without allocating for them."""
    data = bytearray(small.read_bytes())
    at = data.index(b"words") + len("words") + 4 + 4  # key, value type, element type
    data[at : at + 8] = struct.pack("<Q", count)
    small.write_bytes(data)
    with pytest.raises(CorruptModel, match="words"):
        GGUFFile(small)


def test_unsupported_type_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("w", np.zeros((1, 136), dtype=np.uint8), raw_dtype=GGMLQuantizationType.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="IQ4_XS.*Q4_K"):
        GGUFFile(path)


def test_smollm2(smollm2: Path) -> None:
    file = GGUFFile(smollm2)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152 and len(file.tensors) == 272
    assert {info.type for info in file.tensors.values()} == {"Q8_0", "Q4_1", "F32"}


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_a_tensor_off_the_alignment_is_damage(small: Path, shift: int) -> None:
    """Numbers at odd places could not be read in place; the second tensor's offset is the last one of the table."""
    data = bytearray(small.read_bytes())
    at = data.index(b"two") + 3 + 4 + 8 + 4  # its name, rank, one dimension and type
    struct.pack_into("<Q", data, at, struct.unpack_from("<Q", data, at)[0] - shift)
    small.write_bytes(data)
    with pytest.raises(CorruptModel, match="'two' lies at"):
        GGUFFile(small)
