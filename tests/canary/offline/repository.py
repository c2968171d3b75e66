"""Repositories that tests make, and what is in them."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def state(folder: Path) -> dict[str, str]:
    """Every file below, those of git with them, by its bytes; what runs write on their own left out."""
    left_out = {"__pycache__", ".fusion", ".hypothesis", "fusion.json", "fusion.html", "stdout", "stderr"}
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not left_out & set(path.relative_to(folder).parts)
    }
