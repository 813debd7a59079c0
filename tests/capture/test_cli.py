"""The `stepgraph` command as a user meets it: results, one-sentence errors, exit statuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepgraph.capture.cli import main

TINY = ["--model", "random:tiny-llama", "--max-batch", "2", "--max-len", "128", "--mode", "EAGER"]


def generate(*arguments: str) -> int:
    return main(["generate", *TINY, *arguments])


def test_json_on_stdout_is_the_last_line_and_has_the_documented_keys(capsys):
    assert (
        generate("1,2,3", "4,5,6", "--max-new-tokens", "5", "--drafter", "early-exit:1", "--json", "-", "--mode", "FULL") == 0
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(document) == {"model", "drafter", "verify", "mode", "device", "dtype", "weights", "requests", "stats"}
    assert (document["model"], document["drafter"], document["mode"]) == ("random:tiny-llama", "early-exit:1", "FULL")
    assert [set(request) for request in document["requests"]] == [{"prompt", "text", "token_ids", "finish_reason"}] * 2
    assert [len(request["token_ids"]) for request in document["requests"]] == [5, 5]
    stats = document["stats"]
    assert set(stats) >= {
        "steps", "tokens", "acceptance_length", "drafted_per_step", "accepted_per_step", "per_position_acceptance",
        "graph_hits", "graph_misses", "captures", "capture_s", "replays_by_key", "ttft_ms", "tpot_ms", "tokens_per_s",
    }  # fmt: skip
    assert (stats["tokens"], stats["graph_misses"], stats["captures"]) == (10, 0, 2)
    assert sum(stats["replays_by_key"].values()) == stats["graph_hits"] == stats["steps"]


def test_same_seed_same_text_and_another_seed_another(capsys):
    texts = []
    for seed in ("3", "3", "4"):
        assert generate("9,8,7", "--temperature", "0.9", "--seed", seed, "--max-new-tokens", "12", "--json", "-") == 0
        texts.append(json.loads(capsys.readouterr().out.splitlines()[-1])["requests"][0]["token_ids"])
    assert texts[0] == texts[1] != texts[2]


def test_schedule_from_text_and_from_file_choose_the_same_k(capsys, tmp_path):
    schedule = [[1, 1, 2], [2, 2, 0]]
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps(schedule))
    documents = []
    for given in (json.dumps(schedule), str(file)):
        assert generate("5,5,5,5", "5,5,5", "--schedule", given, "--json", "-", "--mode", "FULL", "--max-new-tokens", "9") == 0
        documents.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert documents[0]["stats"]["replays_by_key"] == documents[1]["stats"]["replays_by_key"]
    assert set(documents[0]["stats"]["replays_by_key"]) <= {"1x2", "2x0", "1x0", "2x2"}


def test_prompts_file(capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "category": "c", "prompt": "1,2"}\n\n{"prompt": "3"}\n')
    assert generate("--prompts", str(file), "--max-new-tokens", "2", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [request["prompt"] for request in document["requests"]] == ["1,2", "3"]


BAD = [
    (["1,2", "--k", "-1"], "k is -1"),
    (["1,2", "--k", "1.5"], "invalid int value: '1.5'"),
    (["1,2", "--k", "2", "--schedule", "[[1,2,3]]"], "not allowed with"),
    (["1,2", "--drafter", "none", "--k", "2"], "without a drafter only k=0"),
    (["1,2", "--drafter", "oracle"], "drafter is 'oracle'"),
    (["1,2", "--drafter", "early-exit:9"], "early-exit:9; the target has 3 layers"),
    (["1,2", "--drafter", "draft-model:nowhere"], "'nowhere' is no model"),
    (["1,2", "--drafter", "draft-model:random:smollm2-135m"], "vocabulary"),
    (["1,2", "--max-batch", "0"], "max_batch is 0"),
    (["1,2", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["1,2", "--temperature", "nan"], "temperature is nan"),
    (["1,2", "--temperature", "inf"], "temperature is inf"),
    (["1,2", "--top-p", "0"], "top_p is 0.0"),
    (["1,2", "--seed", "-4"], "seed is -4"),
    (["1,2", "--dtype", "int7"], "invalid choice: 'int7'"),
    (["1,2", "--mode", "HALF"], "invalid choice: 'HALF'"),
    (["1,2", "--schedule", "[[1,4,2],[3,9,1]]"], "entry 2"),
    (["1,2", "--schedule", "nowhere.json"], "nowhere.json"),
    (["1,2", "--json", "nowhere/out.json"], "cannot be written"),
    (["1,2", "--json", "."], "cannot be written"),
    (["1,2", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    (["1,2", "--max-len", "9999999"], "max_len is 9999999"),
    ([",".join(["1"] * 200)], "the prompt has 200 tokens; max_len=128 leaves room for 127"),
    (["1,two"], "no tokenizer"),
    (["1,2", "--chat"], "the model has no tokenizer"),
    (["1,2", "--top-k", str(2**64)], f"top_k is {2**64}"),
    (["1,2", "--device", "cuda:x"], "device is 'cuda:x'"),
    (["1,2", "--bogus"], "unrecognized arguments: --bogus"),
    (["caf\udce9"], "no Unicode text"),
    (["999999"], "token id 999999"),
    ([""], "a prompt is empty"),
    ([], "no prompt was given"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(a)[:40] or "nothing" for a, _ in BAD])
def test_bad_input_is_one_sentence_and_a_status(arguments, message, capsys):
    try:
        status = generate(*arguments)
    except SystemExit as stop:  # argparse
        status = stop.code
    streams = capsys.readouterr()
    errors = [line for line in streams.err.splitlines() if line.startswith("stepgraph: error: ")]
    assert status == 2
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in streams.err


def test_prompts_file_with_every_legal_character(capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"id": "a\u2028b\x85", "category": "c", "prompt": "1,2"}\r\n', encoding="utf-8")
    assert generate("--prompts", str(file), "--max-new-tokens", "1", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["requests"][0]["prompt"] == "1,2"


def test_result_is_kept_when_the_terminal_cannot_show_it(tmp_path):
    command = [sys.executable, "-P", "-m", "stepgraph.capture.cli", "generate", *TINY, "1,2", "--drafter", "none"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    target = tmp_path / "out.json"
    subprocess.run([*command, "--json", str(target)], env=environment, check=True, capture_output=True)
    assert json.loads(target.read_text())["requests"][0]["prompt"] == "1,2"


@pytest.mark.parametrize("content", ["", "{]\n", '{"id": "a"}\n', '["a"]\n'])
def test_bad_prompts_file_names_the_line(content, tmp_path, capsys):
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    assert generate("--prompts", str(file)) == 2
    assert ("no prompts" if not content else "line 1") in capsys.readouterr().err


def test_unwritable_output_is_found_before_the_work_and_leaves_nothing(tmp_path, capsys):
    target = tmp_path / "kept.json"
    target.write_text("earlier result")
    assert generate("1,2", "--drafter", "oracle", "--json", str(target)) == 2
    assert target.read_text() == "earlier result"
    assert generate("1,2", "--drafter", "oracle", "--json", str(tmp_path / "new.json")) == 2
    assert not (tmp_path / "new.json").exists()


def test_interrupt_ends_cleanly_with_what_there_is(tmp_path):
    """A real SIGINT to a real process, in the middle of a long request."""
    target = tmp_path / "out.json"
    command = [sys.executable, "-P", "-m", "stepgraph.capture.cli", "generate", "1,2,3", "--model", "random:smollm2-135m"]
    command += ["--mode", "EAGER", "--drafter", "none", "--max-new-tokens", "5000", "--json", str(target)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell runs background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert "loaded" in process.stderr.readline()
        time.sleep(2.0)  # somewhere inside generation; 5,000 tokens take minutes anywhere
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (request,) = json.loads(target.read_text())["requests"]
    assert request["finish_reason"] == "aborted"


def test_help_and_module_path():
    run = subprocess.run(
        [sys.executable, "-P", "-m", "stepgraph.capture.cli", "generate", "--help"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0
    assert "--schedule" in run.stdout
    assert not run.stderr
    assert Path(sys.executable).parent.joinpath("stepgraph").exists()


def test_synthetic_acceptance_is_labelled(capsys):
    options = ("7,7,7,7,7,7", "--k", "2", "--synthetic-acceptance", "1,0", "--max-new-tokens", "9", "--json", "-")
    assert generate(*options) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out.splitlines()[-1])
    assert document["verify"] == "synthetic (not lossless)"
    assert "acceptance is synthetic: the text means nothing" in captured.err
    assert "SYNTHETIC (1,0), not lossless" in captured.err
    assert document["stats"]["per_position_acceptance"][1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--synthetic-acceptance", "0.8;0.5"), "--synthetic-acceptance is '0.8;0.5'; allowed are numbers in [0, 1]"),
        (("--synthetic-acceptance", "0.8,1.5,0"), "synthetic_rates is 1.5; allowed is a number in [0, 1]"),
        (("--synthetic-acceptance", "0.8"), "synthetic_rates has 1 entries; the policy may ask k=3"),
        (("--synthetic-acceptance", "0.8", "--drafter", "none"), "drafter is 'none'"),
        (("--logit-bias", "3:1", "--logit-bias", "3:2"), "--logit-bias names token 3 twice"),
    ],
    ids=str,
)
def test_sampling_options_that_make_no_sense(capsys, options, message):
    assert generate("1,2", *options) == 2
    assert message in capsys.readouterr().err
