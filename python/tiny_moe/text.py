"""The training text: the Jargon File 4.4.7 (public domain), from Debian's package dict-jargon."""

import gzip
import re
import subprocess
import tempfile
from pathlib import Path

INSTALLED = Path("/usr/share/dictd/jargon.dict.dz")
HELD_OUT_EVERY = 10


def fetch(path: str | None) -> Path:
    """The given file, else the installed one, else the one unpacked from a fresh download."""
    if path:
        return Path(path)
    if INSTALLED.exists():
        return INSTALLED
    folder = Path(tempfile.mkdtemp(prefix="dict-jargon-"))
    subprocess.run(["apt-get", "download", "dict-jargon"], cwd=folder, check=True)
    package = next(folder.glob("dict-jargon_*.deb"))
    subprocess.run(["dpkg-deb", "--extract", package.name, "."], cwd=folder, check=True)
    return folder / INSTALLED.relative_to("/")


def load(path: str | None = None) -> tuple[bytes, bytes]:
    """(training text, held-out text). Every tenth dictionary entry is held out."""
    text = gzip.decompress(fetch(path).read_bytes()).decode("utf-8")
    entries = re.split(r"\n\n(?=\S)", text)
    first = next(i for i, entry in enumerate(entries) if entry.startswith("(TM)"))
    entries = entries[first:]  # what lies before is the header of the dictionary format
    held_out = entries[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del entries[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return "\n\n".join(entries).encode(), "\n\n".join(held_out).encode()
