"""Requests of real services, as `benchmarks.serving --requests` reads them. These rows are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.serving import __main__ as serving
from benchmarks.serving.recorded import Unreadable, play, read
from benchmarks.serving.traces import MODELS, Request, Scale

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-02-03 04:05:06.5000000,700,50
2024-02-03 04:05:07.2500000,120,11
2024-02-03 04:05:07.2500000,80,7
2024-02-03 04:05:16.5000000,3000,200
2024-02-03 04:05:26.5000000,9000,900
2024-02-03 04:05:36.5000000,44,400
2024-02-03 04:05:46.4999999,45,1
2024-02-03 04:06:06.5000000,46,2
2024-02-03 04:06:26.5000000,47,3
2024-02-03 04:06:46.5000000,48,4
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
7,ChatGPT,700,50,750,Conversation log
7.75,ChatGPT,120,11,131,API log
7.75,GPT-4,80,7,87,Conversation log
17,ChatGPT,3000,200,3200,API log
20,GPT-4,0,0,0,API log
27,GPT-4,9000,900,9900,API log
37,ChatGPT,44,400,444,"Conversation log"
"""
MOONCAKE = """\
{"timestamp": 500, "input_length": 700, "output_length": 50, "hash_ids": [0, 1]}
{"timestamp": 1250, "input_length": 120, "output_length": 11, "hash_ids": [2]}
{"timestamp": 1250, "input_length": 80, "output_length": 7, "hash_ids": [3]}
{"timestamp": 10500, "input_length": 3000, "output_length": 200, "hash_ids": [0, 4, 5, 6, 7, 8]}

{"timestamp": 20500, "input_length": 9000, "output_length": 900, "hash_ids": []}
{"timestamp": 30500, "input_length": 44, "output_length": 400}
"""
FORMATS = {"azure.csv": AZURE, "burstgpt.csv": BURSTGPT, "mooncake.jsonl": MOONCAKE}
FIRST = ((0.0, 700, 50), (0.75, 80, 7), (0.75, 120, 11), (10.0, 3000, 200), (20.0, 9000, 900), (30.0, 44, 400))


def written(directory: Path, text: str, name: str = "trace") -> str:
    (directory / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(directory / name)


@pytest.mark.parametrize("name", FORMATS)
def test_the_three_formats_say_the_same(name: str, tmp_path: Path) -> None:
    """An arrival since the first one, and tokens of prompt and answer; a request that failed is left out."""
    found = read(written(tmp_path, FORMATS[name], name), 35)
    assert [(pytest.approx(at, abs=1e-6), *tokens) for at, *tokens in found.rows] == [*FIRST]
    assert found.failed == (name == "burstgpt.csv")


def test_a_window_begins_after_the_first_request(tmp_path: Path) -> None:
    """Twenty seconds after it, for twenty seconds. A file may have an @ in its name."""
    path = written(tmp_path, AZURE, "a@b")
    found = read(f"{path}@20", 20)
    assert [(round(at, 3), prompt) for at, prompt, _ in found.rows] == [(0.0, 9000), (10.0, 44), (20.0, 45)]
    assert found.name == "a@b@20"
    assert read(path, 1).name == "a@b"
    assert len(read(f"{path}@99.5", 1).rows) == 1
    with pytest.raises(Unreadable, match=r"a@b@95 has no request in its 1 seconds"):
        read(f"{path}@95", 1)
    with pytest.raises(Unreadable, match="a window begins at a number of seconds"):
        read(f"{path}@nan", 1)


def test_load_is_how_many_times_as_fast(tmp_path: Path) -> None:
    """The window of 90 seconds of a run has twice as much of the trace in it, and arrivals come in half the time."""
    files = [read(f"{written(tmp_path, AZURE)}{at}", 360) for at in ("", "@10", "@20")]
    trace = play(files, Scale(time=0.25, load=2, longest=2000))
    assert (trace.seconds, len(trace.works)) == (22.5, MODELS)
    assert trace.works[1].requests[:3] == (Request(0, 1799, 200), Request(5, 1099, 900), Request(10, 44, 400))
    assert [len(work.requests) for work in trace.works] == [7, 4, 4]
    assert files[0].about(Scale(longest=2000)) == "trace: 10 requests (2 cut to the longest), 0 that failed left out"
    assert play(files, Scale(load=4)).works[2].requests[-1].at == pytest.approx(20)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no trace of requests: its first line has neither"),
        ("x" * 70_000, "line 1 has more than 65,536 bytes"),
        (AZURE.splitlines()[0], "has no request in its 90 seconds"),
        (AZURE + "2024-02-03 04:09:06,1\n", "line 12 is no request: '2024-02-03 04:09:06,1'"),
        (AZURE + "2024-02-03 04:05:06,1,2\n", "line 12: it comes before the first request"),
        (BURSTGPT + "nan,ChatGPT,1,1,2,API log\n", "line 9 is no request"),
        (MOONCAKE + '{"timestamp": 1e999, "input_length": 1, "output_length": 1}', "line 8 is no request"),
        (MOONCAKE + '{"timestamp": 600, "input_length": 1}', "line 8 is no request"),
        (MOONCAKE + "\x1b[2J\n", r"line 8 is no request: '\x1b[2J'"),
    ],
)
def test_what_is_no_request_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    """A damaged file, another kind of file, and numbers that no service had."""
    with pytest.raises(Unreadable) as refusal:
        read(written(tmp_path, text), 90)
    assert said in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_the_command_says_what_is_wrong_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_setup", lambda parser, options: None)
    good = written(tmp_path, AZURE)
    for files, said in (
        ([good, good, str(tmp_path / "nothing")], "No such file or directory"),
        ([good, good, written(tmp_path, json.dumps([]), "other")], "other is no trace of requests"),
        ([good, f"{good}@200", good], "trace@200 has no request in its 9 seconds"),
        ([good, good], "expected 3 arguments"),
    ):
        with pytest.raises(SystemExit):
            serving.main(["--device", "host", "--requests", *files, "--time", "0.1", "--load", "1"])
        assert said in capsys.readouterr().err
