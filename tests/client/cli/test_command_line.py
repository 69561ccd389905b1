"""What the command `membroker` says before it looks for a broker, how it reads names, and where it finds no broker."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from tests.support.command import refused

from membroker import types
from membroker.admin import ProcessStatus, TenantBooks, TenantStatus
from membroker.cli import main as cli
from membroker.cli.books import admin_socket
from membroker.cli.segment_name import SegmentPath
from membroker.errors import InvalidRequest


def test_a_wrong_command_line_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for command, complaint in [
        ("", "the following arguments are required: COMMAND: `membroker --help` lists all\n"),
        ("quota", "the following arguments are required: ACTION: `membroker quota --help` lists all\n"),
        ("stat", "there is no command `membroker stat`, did you mean status?\n"),
        ("quota sett acme", "there is no command `membroker quota sett`, did you mean set?"),
        ("--device 1 status", "options come after the command, as in `membroker COMMAND --device …`"),
        ("models --watsh=1", "unrecognized arguments: --watsh=1, did you mean --watch?"),
        ("status --device 1 --endpoint /run/x", "not allowed with argument"),
        ("models --watch nan", "is not a number of seconds"),
        ("drain --timeout=-1", "'-1' is not a number of seconds from 0.05 to 86400, or 0\n"),
        ("evict llama-7b --yes", "'llama-7b' is not a session, as in sessions/1c0000000001: `membroker sessions"),
        ("quota set acme --weight 1001", "'1001' is not a whole number from 0 to 1000, or none"),
        ("quota set Acme --limit 1GiB", "is not TENANT or TENANT/MODEL"),
        ("segments load x a/weights --model b", "name the segment and its model once"),
        ("segments load x a/b --limit much", "cannot read 'much' as a size"),
        ("segments --admin show a/b", "at its tenant's endpoint"),
        ("segments delete b --admin", "TENANT/MODEL/SEGMENT"),
        ("tenant create Acme", "is not the name of a tenant"),
        ("tenant create a --owner nobody-at-all", "this machine has no user 'nobody-at-all'"),
        ("tenant set a --lend-unused maybe", "is not yes, no or none"),
        ("tenant set a", "name at least one setting to change"),
        ("run --limit 8MiB -- true", "give --model, too"),
        ("run --guest --model m --memory 1MiB --engine vllm -- true", "leave --guest or"),
        ("run --guest --model m --memory 1GiB --limit 1GiB -- true", "--limit is for programs that use membroker"),
        ("run --guest --model m --memory 1GiB --sleep-after 3 -- true", "--sleep-after counts from the last"),
        ("run --door 1:2 -- true", "--door is for a guest: give --guest, too"),
        *(
            (f"run --guest --model m --memory 1GiB --door {door} -- true", f"{door!r} is not [ADDRESS:]PORT:PORT")
            for door in ("80", "80:80", "[::1:80:81", "0:80")
        ),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main(command.split())
        assert caught.value.code == 2
        assert complaint in capsys.readouterr().err


def test_a_wrong_name_gets_the_grammar_of_its_kind_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, kind in [
        (("quota", "set", "Foo Bar/chat", "--weight", "1"), "TENANT"),
        (("run", "--model", "a b", "--", "true"), "MODEL"),
        (("segments", "show", "chat/a b"), "SEGMENT"),
        (("segments", "show", "a b/weights"), "MODEL"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(arguments)
        said = capsys.readouterr().err
        assert [each for each in ("TENANT", "MODEL", "SEGMENT") if f"{each} is " in said] == [kind], said


def test_every_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in [
        *("", "status", "models", "sessions", "tenants", "processes", "doctor", "demo", "top", "explain", "replay"),
        *("sleep", "wake", "quota", "quota set", "quota list", "run", "segments", "segments load", "segments show"),
        *("segments delete", "forget", "evict", "drain", "undrain"),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main([*arguments.split(), "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert re.search(rf"examples?:\n  membroker {arguments}", text)


def test_the_examples_for_jq_name_fields_that_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody copies them from the help: a wrong name gives null, and no error."""
    values = (types.DeviceStatus, types.ModelStatus, types.SessionStatus, TenantStatus, TenantBooks, ProcessStatus)
    known = {field.name for value in values for field in dataclasses.fields(value)} | {"device"}
    named: set[str] = set()
    for command in ("status", "models", "sessions", "tenants", "processes"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        (program,) = re.findall(r"jq '(.*)'", capsys.readouterr().out)
        named |= set(re.findall(r"\.([a-z_]+)", program))
    assert {"books", "used_bytes", "excess_bytes"} <= named <= known


def test_the_admin_endpoint_is_the_sibling_of_a_tenants() -> None:
    device = "/run/membroker/gpu-12345678"
    assert str(admin_socket(f"{device}/tenants/acme", {})) == f"{device}/admin/grpc.sock"
    assert str(admin_socket(f"{device}/admin", {})) == f"{device}/admin/grpc.sock"
    assert str(admin_socket(None, {"MEMBROKER_ENDPOINT": f"{device}/tenants/acme"})) == f"{device}/admin/grpc.sock"
    with pytest.raises(InvalidRequest, match="--endpoint"):
        admin_socket("/membroker", {})


def test_no_broker_is_one_sentence_and_status_1(tmp_path: Path) -> None:
    for arguments in [
        *(("status", "--json"), ("models", "--admin"), ("forget", "sessions/1"), ("drain",)),
        *(("segments",), ("segments", "show", "m/w"), ("segments", "delete", "a/m/w", "--admin")),
    ]:
        whole = arguments[0] in ("drain", "undrain")  # not to be told at a tenant's endpoint
        env = {"MEMBROKER_ENDPOINT": str(tmp_path / ("admin" if whole else "tenants/acme"))}
        assert "membrokerd" in refused(*arguments, env=env)


def test_names_are_read_as_people_write_them() -> None:
    assert str(SegmentPath.parse("weights")) == "weights"
    assert str(SegmentPath.parse("llama-7b/weights.v2")) == "llama-7b/weights.v2"
    whole = "tenants/uid-1000/models/m/segments/w"
    assert str(SegmentPath.parse("uid-1000/m/w")) == str(SegmentPath.parse(whole)) == whole
    assert SegmentPath.parse("models/segments") == SegmentPath("", "models", "segments")
    for text in ("", "/", "a/", "/b", "a//b", "A/b/c/d", "a/b/c/d/e", "x" * 97, "a b", "a\n"):
        with pytest.raises(ValueError, match="is not SEGMENT"):
            SegmentPath.parse(text)


def test_three_parts_begin_with_the_tenant_of_the_endpoint_or_with_the_models_name() -> None:
    """What `membroker segments` prints can be pasted, and so can what Hugging Face calls a model."""
    for text, at_red in [
        ("Qwen/Qwen3-8B/weights", "Qwen/Qwen3-8B/weights"),
        ("meta/llama/weights", "meta/llama/weights"),
        ("red/llama/weights", "tenants/red/models/llama/segments/weights"),
        ("red/Qwen/Qwen3-8B/weights", "tenants/red/models/Qwen/Qwen3-8B/segments/weights"),
        ("blue/Qwen/Qwen3-8B/weights", "tenants/blue/models/Qwen/Qwen3-8B/segments/weights"),
        ("tenants/blue/models/m/segments/w", "tenants/blue/models/m/segments/w"),
        ("tenants/red/models/a/segments/segments/w", "tenants/red/models/a/segments/segments/w"),
    ]:
        assert str(SegmentPath.parse(text).within("tenants/red")) == at_red
