"""Texts that records share: what is shortened is restored, by compiled code and without it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persistence.lmdb import texts as module
from persistence.lmdb.texts import LIMIT, Texts, decode_texts, encode_texts
from persistence.names import StageRef

STAGE = StageRef("fleet", 1, "aircraft")
CODES = bytes(range(32))
PARTS = [b"a", b"b", b"ab", b'"held":[', b'"held"', b"\xc3\xa4", b"1", b"22", b",", b"}"]
VALUES = st.lists(st.lists(st.sampled_from(PARTS)).map(b"".join), max_size=12)
TEXTS = st.lists(st.lists(st.sampled_from(PARTS), min_size=1).map(b"".join), max_size=LIMIT, unique=True).map(Texts)


@pytest.fixture(params=["one by one", "compiled"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW", 1000 if request.param == "one by one" else -1)


@given(VALUES, TEXTS)
@example([], Texts())
@example([b"", b"abab"], Texts([b"ab", b"aba"]))
def test_what_is_shortened_is_restored(values: list[bytes], texts: Texts) -> None:
    short = texts.shortened(values)
    assert (short is None) == (not texts.texts)
    assert texts.restored(values if short is None else short) == values
    if short:
        assert texts.restored([b"\0\1\2" + one for one in short], 3) == values
        assert all(len(one) <= len(value) for one, value in zip(short, values, strict=True))


@given(VALUES, TEXTS)
def test_compiled_code_shortens_as_the_loop_does(values: list[bytes], texts: Texts) -> None:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for few in (-1, 1000):
            patch.setattr(module, "_FEW", few)
            found.append(texts.shortened(values))
    assert found[0] == found[1]


@given(VALUES, TEXTS.filter(lambda one: one.texts), st.sampled_from([CODES[i : i + 1] for i in range(32)]), st.data())
def test_a_value_with_a_byte_below_32_is_not_shortened(
    values: list[bytes], texts: Texts, code: bytes, data: st.DataObject
) -> None:
    value = data.draw(st.sampled_from(PARTS)) + code
    assert texts.shortened([*values, value]) is None
    assert texts.with_those_of([value] * 20) is texts


@given(TEXTS, st.integers(0, 31))
def test_a_byte_without_a_text_is_an_error(texts: Texts, byte: int) -> None:
    known = 0 < byte <= len(texts.texts)
    if known:
        assert texts.restored([CODES[byte : byte + 1]]) == [texts.texts[byte - 1]]
    else:
        with pytest.raises(LookupError):
            texts.restored([b"a", CODES[byte : byte + 1]])


@given(VALUES, st.lists(st.sampled_from(PARTS), min_size=30, max_size=30))
def test_further_texts_follow_those_that_are_known(values: list[bytes], more: list[bytes]) -> None:
    texts = Texts().with_those_of(values)
    further = texts.with_those_of([*values, *more])
    assert further.texts[: len(texts.texts)] == texts.texts
    assert len(further.texts) <= LIMIT
    assert further.restored(texts.shortened(values) or values) == values
    assert decode_texts(encode_texts(further), STAGE).texts == further.texts
