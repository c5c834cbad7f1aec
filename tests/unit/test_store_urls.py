"""URLs of stores in files: every directory has a URL of its own, and no part of a URL is left out silently."""

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persistence.errors import InvalidUrl
from persistence.protocol import FlowRef
from persistence.registry import open_store
from persistence.urls import embedded, path_of

ODD = ["a#b", "p%41q", "what?", "a%23b", "new\nline", "tab\tulator", " space ", "ü", "a;b&c=d", "pAq"]


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_the_url_of_a_path_names_that_path(name: str) -> None:
    path = Path("/states") / name
    assert path_of(embedded("lmdb", path), "directory", "") == path.absolute()


@pytest.mark.parametrize("scheme", ["lmdb", "sqlite"])
def test_directories_of_any_name_have_stores_of_their_own(tmp_path: Path, scheme: str) -> None:
    """Reports symfony 45295, ncps 718 and beads 2150: states of `a#b` were found in `a`, those of `p%41q` in `pAq`."""
    for name in ODD:
        (tmp_path / name).mkdir()
        with closing(open_store(embedded(scheme, tmp_path / name / "states"))) as store:
            assert store.acquire_epoch(FlowRef("f")) == 1, f"{name} has the states of another directory"
        assert (tmp_path / name / "states").exists()
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(ODD)


@pytest.mark.parametrize("url", ["lmdb://states#prod", "sqlite:///tmp/a.db#", "redis://:pa#ss@host", "memory://a#b"])
def test_what_follows_a_hash_sign_is_not_left_out(url: str) -> None:
    with pytest.raises(InvalidUrl, match="has a '#'") as raised:
        open_store(url)
    assert "Write %23 for it" in str(raised.value)
    assert "ss@host" not in str(raised.value)
