import triton

from forerun.models.cuda.launch import cdiv, next_power_of_2


def test_host_arithmetic_is_tritons() -> None:
    for n in (*range(70), 1023, 1024, 1025, 1 << 30):
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert [cdiv(n, d) for d in (1, 7, 16)] == [triton.cdiv(n, d) for d in (1, 7, 16)]
