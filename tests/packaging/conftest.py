"""The wheel, built once a run and installed in a clean environment that borrows the dependencies of this one."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel in it."""

    home: Path
    wheel: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, away from the source tree."""
        return subprocess.run(
            [str(self.home / "bin" / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            cwd=self.home,
            check=False,
        )

    def python(self, code: str) -> str:
        done = self.run("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("headwater-*.whl"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    home = tmp_path_factory.mktemp("env") / "venv"
    venv.create(home, with_pip=False)
    environment = Installed(home, wheel)
    site = Path(environment.python("import sysconfig; print(sysconfig.get_path('purelib'))"))
    # Another project of PyPI has a package of this name; here it comes in with the dependencies.
    other = home / "other" / "envelope"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise ImportError('the other project')\n")
    dependencies = home / "dependencies"
    dependencies.mkdir()
    for item in Path(sysconfig.get_path("purelib")).iterdir():
        # All but the editable install of this source tree.
        if "headwater" not in item.name.lower() and item.suffix != ".pth":
            (dependencies / item.name).symlink_to(item)
    (site / "dependencies.pth").write_text(f"{dependencies}\n{other.parent}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return environment


@pytest.fixture(scope="session")
def names(wheel: Path) -> set[str]:
    """Files in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())
