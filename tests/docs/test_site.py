"""The site builds without a warning, no link in it is dead, and it has every public name."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.util.inventory import InventoryFile

from tests.support.faces import FACES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "docs", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


class Links(HTMLParser):
    """Where a page leads to, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name == "id" and value:
                self.anchors.add(value)


def dead_links(site: Path) -> Iterator[str]:
    pages = {path: Links(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 10
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            there = (path.parent / unquote(url.path)).resolve() if url.path else path
            anchors = pages[there].anchors if there in pages else {"", unquote(url.fragment)}
            if not there.is_file() or unquote(url.fragment) not in anchors:
                yield f"{path.relative_to(site)}: {target}"


def test_no_link_within_the_site_is_dead(site: Path) -> None:
    assert [*dead_links(site)] == []


def known(site: Path) -> set[str]:
    """The names that the site has a description of."""
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    return {name for kind in inventory for name in inventory[kind]}


def test_it_has_every_public_name(site: Path) -> None:
    public = {f"{face}.{name}" for face in FACES for name in importlib.import_module(face).__all__}
    assert public - known(site) == set()


def test_nothing_of_it_is_fetched_from_elsewhere_when_it_is_read(site: Path) -> None:
    foreign = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(?:https?:)?//", re.IGNORECASE)
    assert [path.name for path in site.rglob("*.html") if foreign.search(path.read_text())] == []
