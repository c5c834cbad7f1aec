"""A short run of the fuzzer; `make fuzz` is the long one."""

from tests.fuzz.codec import fuzz


def test_nothing_but_envelope_errors_comes_out_of_the_codec() -> None:
    outcomes = fuzz(15_000, seed=20_261_121)
    assert outcomes["read"] > 500
    assert len(outcomes) > 6
