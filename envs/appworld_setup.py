"""AppWorld's engine and data, made once: a virtual environment of its own, since it needs old packages (pydantic 1).

    python -m envs.appworld_setup                       # downloads the data too: appworld download data
    python -m envs.appworld_setup --bundle FILE         # takes them from a bundle in AppWorld's own format
    python -m envs.appworld_setup --data FOLDER         # puts them into FOLDER/data

The environment lies in ~/.cache/scaffold-funnel/appworld/venv ($SCAFFOLD_FUNNEL_CACHE instead of ~/.cache/scaffold-funnel), 230 MB, the
data beside it or in FOLDER, 80 MB. FOLDER is what the engine calls its root: give it to runs as $APPWORLD_ROOT or
`--env-options data=FOLDER`.

Licence: AppWorld's tasks, solutions and databases, and what is made from them, may be passed on encrypted only. A run's folder holds
them in plain text (prompts, transcripts, states): do not publish it.
"""
import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from envs import BadInput

VERSION, DATA_VERSION = "0.1.3.post1", "0.1.0"
SETUP = "python -m envs.appworld_setup makes it"
UNPACK = """import sys
from appworld.common.constants import PASSWORD, SALT
from appworld.common.utils import unpack_bundle
unpack_bundle(bundle_file_path=sys.argv[1], base_directory=sys.argv[2], password=PASSWORD, salt=SALT)"""


def home() -> Path:
    """Where the environment lies, and the data unless another folder is given."""
    return Path(os.environ.get("SCAFFOLD_FUNNEL_CACHE") or Path.home() / ".cache" / "scaffold-funnel").absolute() / "appworld"


def checked_python() -> Path:
    """The interpreter of the engine's environment. Raises BadInput where that is not there, not whole, or of another version."""
    venv = home() / "venv"
    found = list(venv.glob("lib/python3*/site-packages/appworld-*.dist-info"))
    if not (venv / "bin" / "python").exists() or not found:
        raise BadInput(f"appworld: no engine in {venv}: {SETUP}")
    versions = [path.name.removeprefix("appworld-").removesuffix(".dist-info") for path in found]
    if versions != [VERSION]:
        raise BadInput(f"appworld: the engine in {venv} is of version {', '.join(versions)}, needed is {VERSION}: remove it; {SETUP}")
    if not (found[0].parent / "appworld" / "apps" / "spotify" / "apis.py").exists():
        raise BadInput(f"appworld: the engine in {venv} is not unpacked (appworld install): {SETUP}")
    return venv / "bin" / "python"


def checked_data(root=None) -> Path:
    """The folder `data` below the root that is given, or $APPWORLD_ROOT, or that of the set-up. Raises BadInput where there are none,
    not all, or of another version."""
    data = Path(root or os.environ.get("APPWORLD_ROOT") or home()).expanduser().absolute() / "data"
    if not data.is_dir():
        raise BadInput(f"appworld: no data in {data}: {SETUP}, or give --env-options data=FOLDER, the folder in which `data` lies")
    version = data / "version.txt"
    found = version.read_text().strip() if version.is_file() else "unknown"
    if found != DATA_VERSION:
        raise BadInput(f"appworld: the data in {data} are of version {found}, needed are {DATA_VERSION}: remove that folder; {SETUP}")
    missing = [name for name in ("datasets/train.txt", "datasets/dev.txt", "tasks", "base_dbs", "api_docs") if not (data / name).exists()]
    if missing:
        raise BadInput(f"appworld: {data} has no {', '.join(missing)}, so it is not whole: remove that folder; {SETUP}")
    return data


def run(*command, **variables):
    """A command of the set-up; its last line of output where it fails. Raises BadInput."""
    done = subprocess.run(list(map(str, command)), env=os.environ | variables, text=True, capture_output=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        name = " ".join(" ".join(map(str, command)).split()[:5])
        raise BadInput(f"appworld: {name} failed: {said[-1][:200] if said else done.returncode}")


def make_engine():
    venv = home() / "venv"
    try:
        checked_python()
        print(f"the engine is in {venv}")
        return
    except BadInput:
        print(f"making {venv}: two minutes")
    run(sys.executable, "-m", "venv", "--clear", venv)
    run(venv / "bin" / "python", "-m", "pip", "install", "-q", f"appworld=={VERSION}")
    run(venv / "bin" / "appworld", "install", APPWORLD_CACHE=str(venv / "appworld-tests"), APPWORLD_ROOT=str(venv))
    shutil.rmtree(venv / "appworld-tests", ignore_errors=True)      # the engine's own tests
    checked_python()


def make_data(root: Path, bundle=None):
    """Unpacked beside, then renamed, so that there is never half of it."""
    if (root / "data").exists():
        print(f"the data are in {checked_data(root)}; to make them anew, remove that folder")
        return
    beside = root / "data.new"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        if bundle:
            if not Path(bundle).is_file():
                raise BadInput(f"appworld: there is no bundle {bundle}")
            try:
                run(checked_python(), "-c", UNPACK, Path(bundle).absolute(), beside)
            except BadInput as error:
                raise BadInput(f"appworld: {bundle} is no whole bundle of AppWorld's, get it again ({str(error)[-120:]})") from error
        else:
            run(home() / "venv" / "bin" / "appworld", "download", "data", APPWORLD_ROOT=str(beside))
        checked_data(beside)
        (beside / "data").rename(root / "data")
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"the data are in {root / 'data'}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise BadInput(f"{message} (see --help)")


def main(argv=None):
    parser = Parser(prog="python -m envs.appworld_setup", description="AppWorld's engine and data.")
    parser.add_argument("--bundle", help="take the data from this bundle instead of downloading them")
    parser.add_argument("--data", help="the folder that gets the folder `data` (default: $APPWORLD_ROOT, or beside the engine)")
    args = parser.parse_args(argv)
    make_engine()
    make_data(Path(args.data or os.environ.get("APPWORLD_ROOT") or home()).expanduser().absolute(), args.bundle)


if __name__ == "__main__":
    from rl.runs import cli
    cli(main)
