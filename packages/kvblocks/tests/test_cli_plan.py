"""`kvblocks plan`: the worked examples as a person asks for them, and what is answered to mistakes."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvblocks.cli import main

SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--dtype", "float16")
S7 = (*SHAPE, "--pool", "16MiB", "--lengths", "17,31,32,33", "--block-size", "8,16,32")
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}

Capture = pytest.CaptureFixture[str]


def plan(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *arguments, "--json"))
    return found


def row(text: str, first: str) -> list[str]:
    """The words of the table's line that begins so."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [first])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), "utf-8")
    return path


# ── worked examples ──────────────────────────────────────────────────────────────────────────────


def test_s1_and_s2_a_token_and_a_sequence(capsys: Capture) -> None:
    text = plan(capsys, *SHAPE, "--lengths", "4096")
    assert "bytes per token  131,072 bytes (128 KiB)" in text
    assert "sequences        1 with 4,096 tokens in all: 512 MiB" in text


def test_s3_and_s4_weights_and_the_pool_that_is_left(capsys: Capture) -> None:
    memory = ("--gpu-memory", "80GiB", "--workspace", "2GiB", "--reserve", "1GiB")
    text = plan(capsys, *SHAPE, *memory, "--utilization", "0.9", "--weights", "16GB")
    assert "- weights      16,000,000,000 bytes (14.90 GiB) = 16 GB\n" in text
    assert "x utilization  0.9\n" in text
    assert "= pool         58,088,185,856 bytes (54.10 GiB)\n" in text
    counted = plan(
        capsys, *SHAPE, *memory, "--utilization", "0.9", "--parameters", "8e9",
        "--weights-dtype", "float16",
    )  # fmt: skip
    assert "= 16 GB: 8,000,000,000 parameters of 2 bytes\n" in counted
    assert "= pool         58,088,185,856 bytes (54.10 GiB)\n" in counted


def test_s4_what_was_not_given_is_shown_as_that(capsys: Capture) -> None:
    text = plan(capsys, *SHAPE, "--gpu-memory", "16GiB", "--weights", "15GB")
    assert "x utilization  not given, counts as 1\n" in text
    assert "- workspace    not given, counts as 0\n" in text


def test_s4_nothing_left_names_every_term(capsys: Capture) -> None:
    memory = ("--gpu-memory", "16GiB", "--weights", "16GB", "--workspace", "1GiB")
    assert main(["plan", *SHAPE, *memory, "--utilization", "0.9"]) == 2
    assert capsys.readouterr().err == (
        "kvblocks: nothing is left for keys and values: 0.9 of 16 GiB is 14.40 GiB, and weights of "
        "14.90 GiB, workspace of 1 GiB and reserve of 0 B take 15.90 GiB\n"
    )


def test_s5_the_most_that_a_tail_wastes_is_told(capsys: Capture) -> None:
    assert "A sequence leaves at most block size - 1 slots empty." in plan(capsys, *S7)


def test_s6_table_bytes_and_their_share(capsys: Capture) -> None:
    text = plan(capsys, *SHAPE, "--lengths", "4096", "--block-size", "16")
    assert "        16            256        1,024  1/524,288  0.0001907" in text


def test_s7_in_a_table(capsys: Capture) -> None:
    text = plan(capsys, *S7)
    assert "16 MiB): 128 tokens" in text
    assert "4 with 113 tokens in all" in text
    assert row(text, "8")[:9] == ["8", "16", "128", "16", "MiB", "15", "11.72", "yes,", "0"]
    assert row(text, "16")[1:8] == ["9", "144", "18", "MiB", "31", "21.53", "no,"]
    assert row(text, "32")[1:8] == ["5", "160", "20", "MiB", "47", "29.38", "no,"]
    assert "no, 16 slots (2 MiB) short" in text
    assert "no, 32 slots (4 MiB) short" in text


def test_s7_as_json(capsys: Capture) -> None:
    assert as_json(capsys, *S7) == {
        "bytes_per_token": 131_072,
        "pool_bytes": 16 * 2**20,
        "pool_slots": 128,
        "useful_tokens": 113,
        "block_sizes": [
            {
                "block_size": 8,
                "num_blocks": 16,
                "num_slots": 128,
                "bytes": 16 * 2**20,
                "tail_waste_slots": 15,
                "tail_waste_ratio": 15 / 128,
                "table_entries": 16,
                "table_bytes": 64,
                "fits": True,
                "free_slots": 0,
                "short_slots": 0,
                "short_bytes": 0,
            },
            {
                "block_size": 16,
                "num_blocks": 9,
                "num_slots": 144,
                "bytes": 18 * 2**20,
                "tail_waste_slots": 31,
                "tail_waste_ratio": 31 / 144,
                "table_entries": 9,
                "table_bytes": 36,
                "fits": False,
                "free_slots": 0,
                "short_slots": 16,
                "short_bytes": 2 * 2**20,
            },
            {
                "block_size": 32,
                "num_blocks": 5,
                "num_slots": 160,
                "bytes": 20 * 2**20,
                "tail_waste_slots": 47,
                "tail_waste_ratio": 47 / 160,
                "table_entries": 5,
                "table_bytes": 20,
                "fits": False,
                "free_slots": 0,
                "short_slots": 32,
                "short_bytes": 4 * 2**20,
            },
        ],
    }


def test_s8_the_recommendation_compares_table_entries(capsys: Capture) -> None:
    text = " ".join(plan(capsys, *S7).split())
    assert "Recommended: blocks of 8, the only one of these that fits." in text
    assert "Its tables have 1.78x the entries of those of 16." in text
    assert "Not known here: how fast a kernel reads blocks of this size" in text


def test_s9_by_the_bytes_of_a_token(capsys: Capture) -> None:
    plans = as_json(
        capsys, "--bytes-per-token", "256KiB", "--pool", "8MiB", "--lengths", "7,11,10",
        "--block-size", "4,8",
    )  # fmt: skip
    assert plans["pool_slots"] == 32
    found = [(p["num_blocks"], p["num_slots"], p["bytes"], p["tail_waste_slots"], p["fits"])
             for p in plans["block_sizes"]]  # fmt: skip
    assert found == [(8, 32, 8 * 2**20, 4, True), (5, 40, 10 * 2**20, 12, False)]


def test_s10_where_token_35_lies(capsys: Capture) -> None:
    arguments = ("--locate", "35", "--block-size", "16")
    assert plan(capsys, *arguments) == "token 35 in blocks of 16: logical block 2, offset 3\n"
    assert as_json(capsys, *arguments) == {
        "locate": [{"token": 35, "block_size": 16, "logical_block": 2, "offset": 3}]
    }


@pytest.mark.parametrize(("dtype", "x"), [("float32", 4), ("float16", 8), ("int8", 16)])
def test_s11_shapes(dtype: str, x: int, capsys: Capture) -> None:
    arguments = (*SHAPE[:-1], dtype, "--layout", "--block-size", "16")
    line = plan(capsys, *arguments).splitlines()[-1]
    assert line == (
        f"32 layers, blocks of 16: x = {x}, {128 // x} chunks a head, "
        f"K [num_blocks, 8, {128 // x}, 16, {x}], V [num_blocks, 8, 128, 16]"
    )


def test_s11_shapes_of_a_pool_have_its_blocks(capsys: Capture) -> None:
    (layout,) = as_json(capsys, *SHAPE, "--layout", "--block-size", "16", "--pool", "18MiB")[
        "layout"
    ]
    assert layout == {
        "num_layers": 32,
        "block_size": 16,
        "x": 8,
        "num_chunks": 16,
        "key": [9, 8, 16, 16, 8],
        "value": [9, 8, 128, 16],
    }


def test_c1_external_fragmentation_is_reported_as_such(capsys: Capture) -> None:
    arguments = ("--fragmentation", "128MiB,used,128MiB,64MiB", "--request", "256MiB")
    text = " ".join(plan(capsys, *arguments).split())
    assert "free 320 MiB free runs 128 MiB, 192 MiB largest run 192 MiB" in text
    assert "256 MiB in one piece is refused although 320 MiB are free: external" in text
    assert "In a pool of equal blocks the same demand fits" in text
    assert as_json(capsys, *arguments) == {
        "fragmentation": {
            "free_bytes": 320 * 2**20,
            "free_runs": [128 * 2**20, 192 * 2**20],
            "largest_run": 192 * 2**20,
            "request": 256 * 2**20,
            "fits_contiguous": False,
            "fits_paged": True,
            "is_external_fragmentation": True,
        }
    }


# ── other ways to ask ────────────────────────────────────────────────────────────────────────────


def test_c2_c3_and_c5_what_one_piece_a_sequence_takes(capsys: Capture) -> None:
    text = plan(capsys, *SHAPE, "--lengths", "200", "--contiguous", "2048,4096")
    rows = [line.split() for line in text.splitlines()]
    assert ["2,048", "reserved", "2,048", "256", "MiB", "1,848", "0", "0", "B"] in rows
    assert ["4,096", "reserved", "4,096", "512", "MiB", "3,896", "0", "0", "B"] in rows
    assert ["power", "of", "two", "256", "32", "MiB", "0", "56", "0", "B"] in rows
    assert ["grown", "by", "512", "512", "64", "MiB", "0", "312", "0", "B"] in rows
    assert ["grown", "by", "1,024", "1,024", "128", "MiB", "0", "824", "0", "B"] in rows
    # A cache that is concatenated for every token moves 1 + 2 + ... + 199 tokens.
    assert ["grown", "by", "1", "200", "25", "MiB", "0", "0", "2.43", "GiB"] in rows


def test_one_piece_a_sequence_as_json(capsys: Capture) -> None:
    found = as_json(capsys, *SHAPE, "--lengths", "200,600", "--contiguous", "2048")["contiguous"]
    assert found[0] == {
        "way": "reserve",
        "size": 2048,
        "num_slots": 4096,
        "bytes": 512 * 2**20,
        "over_allocated_slots": 4096 - 800,
        "rounding_slots": 0,
        "moved_tokens": 0,
        "moved_bytes": 0,
    }
    grown = next(each for each in found if (each["way"], each["size"]) == ("grow", 256))
    assert grown["moved_tokens"] == 256 + 512
    assert grown["moved_bytes"] == (256 + 512) * 131_072


def test_a_request_that_fits_and_one_that_nothing_could_serve(capsys: Capture) -> None:
    segments = ("--fragmentation", "free:128MiB, used:1GiB ,64MiB")
    assert "128 MiB in one piece fits." in plan(capsys, *segments, "--request", "128MiB")
    assert "no more than 192 MiB are free" in plan(capsys, *segments, "--request", "1GiB")
    assert plan(capsys, *segments).endswith("largest run  128 MiB\n")
    assert "free runs    none" in plan(capsys, "--fragmentation", "used")


def test_a_config_is_read(config: Path, capsys: Capture) -> None:
    text = plan(capsys, "--config", str(config), "--lengths", "100")
    assert "model            llama, 32 layers, bfloat16\n" in text
    assert "32 layers: 8 KV heads of 128\n" in text
    assert "131,072 bytes (128 KiB)" in text


def test_a_dtype_goes_before_that_of_the_config(config: Path, capsys: Capture) -> None:
    halved = as_json(capsys, "--config", str(config), "--dtype", "fp8")
    assert halved["bytes_per_token"] == 65_536


def test_layers_of_each_kind_are_shown(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    fields = {
        **LLAMA,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "mamba"],
        "sliding_window": 512,
        "swa_v_head_dim": 64,
    }
    path.write_text(json.dumps(fields), "utf-8")
    text = plan(capsys, "--config", str(path), "--lengths", "2000")
    assert "1 layers: 8 KV heads, keys of 128, values of 64, the last 512 tokens\n" in text
    assert "1 layers: 8 KV heads of 128\n" in text
    assert "Note: 1 of 3 layers keep no keys and values of their own;" in text


def test_latents_are_shown(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}), "utf-8")
    assert "32 layers: one latent of 576\n" in plan(capsys, "--config", str(path))


def test_without_lengths_blocks_and_pool_are_shown(capsys: Capture) -> None:
    text = plan(capsys, "--bytes-per-token", "1KiB", "--pool", "1MB", "--block-size", "16,32")
    assert row(text, "16") == ["16", "16", "KiB", "61", "576", "B"]
    assert "Give --lengths to see what sequences take, and a choice." in text
    assert "no pool given" in plan(capsys, "--bytes-per-token", "1KiB")


def test_without_a_pool_nothing_is_said_of_fitting(capsys: Capture) -> None:
    arguments = ("--bytes-per-token", "1KiB", "--lengths", "20", "--block-size", "16")
    assert "no pool given" in plan(capsys, *arguments)
    found = as_json(capsys, *arguments)
    assert (found["pool_bytes"], found["pool_slots"]) == (None, None)
    assert found["block_sizes"][0]["fits"] is None


def test_lengths_come_from_a_file(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("17\n31, 32\n\n33\n", "utf-8")
    found = as_json(capsys, "--bytes-per-token", "1", "--lengths-from", str(path))
    assert found["useful_tokens"] == 113


def test_lengths_come_through_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("17 31\n32\t33"))
    found = as_json(capsys, "--bytes-per-token", "1", "--lengths-from", "-")
    assert found["useful_tokens"] == 113


@pytest.mark.parametrize("width", [20, 60, 79, 80, 200])
def test_no_line_is_wider_than_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("kvblocks.cli.plan.terminal_width", lambda: width)
    tables = plan(capsys, "--bytes-per-token", "1", "--lengths", "20,30").splitlines()
    assert max(map(len, tables)) <= max(width, 50)  # a name and its value stay on one line


# ── mistakes ─────────────────────────────────────────────────────────────────────────────────────

TOKEN = ("--bytes-per-token", "1KiB")
WAYS = "--bytes-per-token, or --config, or all of --layers, --kv-heads, --head-dim, --dtype"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), f"kvblocks: the cache of a token is needed: {WAYS}"),
        (
            ("--dtype", "float16"),
            "kvblocks: the shape of a token lacks --layers, --kv-heads, --head-",
        ),
        ((*SHAPE[:6],), "kvblocks: the shape of a token lacks --dtype"),
        ((*SHAPE, *TOKEN), f"kvblocks: the cache of a token is given one way: {WAYS}"),
        ((*TOKEN, "--dtype", "int8"), "kvblocks: --dtype says nothing beside --bytes-per-token"),
        ((*SHAPE[:-1], "float4"), "kvblocks: a dtype must be one of float64, float32, float16, "),
        (
            ("--bytes-per-token", "0"),
            "kvblocks: --bytes-per-token must be in [1, 2**63 - 1], got 0",
        ),
        (
            ("--bytes-per-token", "-1"),
            "kvblocks plan: argument --bytes-per-token: a size must be a number and a unit, as",
        ),
        (
            ("--bytes-per-token=-1",),
            "kvblocks plan: argument --bytes-per-token: a size must be a nu",
        ),
        (
            ("--layers", "1.5"),
            "kvblocks plan: argument --layers: a count must be a whole number, as",
        ),
        (
            (*TOKEN, "--contiguous", "2048"),
            "kvblocks: --contiguous needs --lengths: the sequences that it is asked of",
        ),
        (
            (*TOKEN, "--lengths", "20", "--contiguous", "10"),
            "kvblocks: a reservation must hold the longest sequence of 20 tokens, got 10",
        ),
        (("--layers", "0", *SHAPE[2:]), "kvblocks: num_layers must be in [1, 2**63 - 1], got 0"),
        ((*TOKEN, "--pool", "0"), "kvblocks: --pool must be in [1, 2**63 - 1], got 0"),
        (
            (*TOKEN, "--pool", "nan"),
            "kvblocks plan: argument --pool: a size must be a number and a",
        ),
        (
            (*TOKEN, "--pool", "1e99"),
            "kvblocks plan: argument --pool: sizes and counts must be at m",
        ),
        (
            (*TOKEN, "--lengths", "0"),
            "kvblocks plan: argument --lengths: a number of tokens must be",
        ),
        (
            (*TOKEN, "--lengths", "17,,3"),
            "kvblocks plan: argument --lengths: a count must be a whol",
        ),
        (
            (*TOKEN, "--lengths", "-5"),
            "kvblocks plan: argument --lengths: a count must be a whole number, as 4096",
        ),
        (
            (*TOKEN, "--lengths", "9" * 5000),
            "kvblocks plan: argument --lengths: a count must be a w",
        ),
        (
            (*TOKEN, "--block-size", "0"),
            "kvblocks plan: argument --block-size: a number of tokens ",
        ),
        (
            (*TOKEN, "--blocksize", "8"),
            "kvblocks plan: unrecognized arguments: --blocksize 8 (see kvblocks plan --help)",
        ),
        (
            (*TOKEN, "--block", "8"),
            "kvblocks plan: unrecognized arguments: --block 8 (see kvblocks plan --help)",
        ),
        (
            (*TOKEN, "extra"),
            "kvblocks plan: unrecognized arguments: extra (see kvblocks plan --help)",
        ),
        ((*TOKEN, "--weights", "1GB"), "kvblocks: --weights needs --gpu-memory to be taken from"),
        (
            (*TOKEN, "--utilization", "0.9"),
            "kvblocks: --utilization needs --gpu-memory to be taken",
        ),
        (
            (*TOKEN, "--gpu-memory", "1GB"),
            "kvblocks: --gpu-memory needs the weights that live ther",
        ),
        (
            (*TOKEN, "--gpu-memory", "1GB", "--pool", "1MB"),
            "kvblocks: the pool is given by --pool or by --gpu-memory, not by both",
        ),
        (
            (*TOKEN, "--gpu-memory", "1GB", "--weights", "1MB", "--parameters", "1"),
            "kvblocks: weights are given by --weights or by --parameters, not by both",
        ),
        (
            (*TOKEN, "--gpu-memory", "1GB", "--weights", "1MB", "--utilization", "90%"),
            "kvblocks plan: argument --utilization: a share must be above 0 and at most 1, as 0.9",
        ),
        (
            (*TOKEN, "--lengths", "1", "--lengths-from", "x"),
            "kvblocks plan: argument --lengths-from: not allowed with argument --lengths",
        ),
        (
            (*TOKEN, "--layout"),
            "kvblocks: --layout needs the shape of a token: --config, or --kv-h",
        ),
        ((*TOKEN, "--request", "1KiB"), "kvblocks: --request needs --fragmentation: the segments"),
        (
            ("--fragmentation", "used:x"),
            "kvblocks plan: argument --fragmentation: a size must be a",
        ),
        (
            ("--locate", "-1"),
            "kvblocks plan: argument --locate: a count must be a whole number, as 4096",
        ),
        (
            (*TOKEN, "--lengths-from", "missing"),
            "kvblocks: missing cannot be read: No such file or",
        ),
        (("--config", "."), "kvblocks: . cannot be read: Is a directory"),
    ],
)
def test_a_mistake_is_answered_with_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: Capture
) -> None:
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1
    assert len(shown.err) < 500


def test_a_length_that_is_none_is_named_with_its_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("17\n31 many\n", "utf-8")
    assert main(["plan", *TOKEN, "--lengths-from", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"kvblocks: {path}, line 2: a count must be a whole number, as 4096 or 8e9, got 'many'\n"
    )
    path.write_text("\n", "utf-8")
    assert main(["plan", *TOKEN, "--lengths-from", str(path)]) == 2
    assert capsys.readouterr().err == f"kvblocks: {path} has no lengths in it\n"


def test_a_config_without_a_dtype_asks_for_one(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "torch_dtype": None}), "utf-8")
    assert main(["plan", "--config", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"kvblocks: {path} names no dtype: give --dtype, as float16\n"
    )


def test_shapes_of_latents_are_not_those_of_heads(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "kv_lora_rank": 512}), "utf-8")
    assert main(["plan", "--config", str(path), "--layout"]) == 2
    assert "--layout needs keys and values of one dimension" in capsys.readouterr().err
