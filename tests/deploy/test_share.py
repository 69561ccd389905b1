"""Completions and manual pages: as the parsers are, and as real shells and man take them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import manual

SHARE = Path(__file__).parents[2] / "deploy" / "share"


def run(*command: str | Path, **variables: str) -> str:
    """Run a tool, or skip where it is not installed."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: apt-get install {command[0]})")
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_the_files_are_as_the_parsers_are() -> None:
    """A command or an option that is added is written there, too: make manual."""
    files = manual.files()
    assert {path for path in SHARE.rglob("*") if path.is_file()} == set(files) - {manual.PAGE}
    assert [str(path) for path, text in files.items() if path.read_text() != text] == []
    assert not any("SUPPRESS" in text for text in files.values()), "an option without help is not for people"


LINES = {
    "membroker qu": "quota",
    "membroker quota set --gua": "--guarantee",
    "membroker top --int": "--interval",
    "membroker segments lo": "load",
    "membrokerd --check": "--check-config",
}


def test_bash_completes() -> None:
    for line, expected in LINES.items():
        command = line.split()[0]
        script = (
            f"source {SHARE}/bash-completion/completions/{command}; COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; "
            f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            f"$(complete -p {command} | sed 's/.*-F \\([^ ]*\\).*/\\1/'); printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        assert expected in run("bash", "--norc", "-c", script).split()


def test_fish_completes(tmp_path: Path) -> None:
    for line, expected in LINES.items():
        completions = SHARE / "fish" / "vendor_completions.d" / f"{line.split()[0]}.fish"
        script = f"source {completions}; complete --do-complete {line!r}"
        found = run("fish", "--no-config", "-c", script, HOME=str(tmp_path))
        assert expected in [row.split("\t")[0] for row in found.splitlines()]


@pytest.mark.parametrize("command", ["membroker", "membrokerd"])
def test_zsh_knows_the_command(command: str, tmp_path: Path) -> None:
    functions = SHARE / "zsh" / "site-functions"
    script = f"fpath=({functions} $fpath); autoload -Uz compinit; compinit -u -d {tmp_path}/dump; "
    script += f"print $_comps[{command}]; autoload +X _{command} && which _{command}"
    assert run("zsh", "-fc", script).startswith(f"_{command}\n")
    run("zsh", "-nf", functions / f"_{command}")
    text = (functions / f"_{command}").read_text()
    assert all(expected in text for line, expected in LINES.items() if line.split()[0] == command)


@pytest.mark.parametrize("page", ["man1/membroker.1", "man8/membrokerd.8"])
def test_man_shows_the_page(page: str) -> None:
    """Without a warning, and with every command and option, and their examples."""
    text = run("man", "--warnings", "-l", SHARE / "man" / page, MANPAGER="cat", MANWIDTH="200", LC_ALL="C.UTF-8")
    plain = re.sub(r".\x08", "", text)
    parser = manual.client_parser() if page.endswith(".1") else manual.daemon_parser()
    for words, command in manual.commands(parser, parser.prog):
        assert f"   {words}" in plain
        for action in command._actions:
            assert all(option in plain for option in action.option_strings if option not in ("-h", "--help")), words
    assert "examples:" in plain
