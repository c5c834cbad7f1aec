"""Checks a commit message: python -m tests.commit_subject FILE. The hook `commit-msg` runs it."""

import sys
from pathlib import Path

LONGEST = 72


def problem(message: str) -> str:
    """What is wrong with a message as git hands it to a hook, comments included; empty if nothing is."""
    text = message.partition("\n# ------------------------ >8 ------------------------\n")[0]
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).strip("\n").split("\n")
    subject = lines[0]
    if not subject.strip():
        return "the commit has no subject"
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters, at most {LONGEST} are allowed: move the reason to the body"
    if len(lines) > 1 and lines[1].strip():
        return "leave the line after the subject empty"
    return ""


if __name__ == "__main__":
    sys.exit(problem(Path(sys.argv[1]).read_text(encoding="utf-8")) or 0)
