"""Spoiled checkpoints: a bounded part of what `nox -s fuzz -- checkpoints` runs, and its own parts."""

import random
from pathlib import Path

import pytest

from kvruntime.errors import CheckpointError
from kvruntime.json_files import read_object
from kvruntime.weights import load_checkpoint
from kvruntime.weights.safetensors_header import read_header

from . import fuzz_checkpoints
from .checkpoint_files import GGUF, make_folder, make_gguf, write


def test_what_is_not_spoiled_loads(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        write(tmp_path, make_folder(family).to_files())
        assert load_checkpoint(tmp_path).config.architecture == family
    write(tmp_path, {"a.gguf": make_gguf().to_bytes()})
    path = tmp_path / "a.gguf"
    assert load_checkpoint(path, cache_dir=tmp_path / "cache").config.num_layers == 1


def test_spoiled_checkpoints_are_refused_by_the_error_of_the_package() -> None:
    failed, num_loaded = fuzz_checkpoints.run(seed=7, first=0, count=2000)
    assert failed == []
    assert 0 < num_loaded < 1000


def test_a_case_is_repeated_by_its_number() -> None:
    first, again = (fuzz_checkpoints.spoiled_folder(random.Random("1 5")) for _ in range(2))  # noqa: S311
    assert first == again


def test_a_failing_case_prints_the_line_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz_checkpoints, "run", lambda *_: (["nox -s fuzz -- checkpoints"], 0))
    assert fuzz_checkpoints.main(["--cases", "1"]) == 1
    assert "nox -s fuzz -- checkpoints" in capfd.readouterr().out


def header(tmp_path: Path, *entries: tuple[str, object], data: int = 8) -> Path:
    folder = make_folder("llama")
    folder.header, folder.data = list(entries), bytes(data)
    path = tmp_path / "model.safetensors"
    path.write_bytes(folder.to_files()["model.safetensors"])
    return path


def entry(begin: int, end: int, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_says_shapes_and_places(tmp_path: Path) -> None:
    path = header(tmp_path, ("b", entry(8, 12, (1, 2), "BF16")), ("a", entry(0, 8)), data=12)
    found = read_header(path)
    assert {name: (one.shape, one.begin, one.end) for name, one in found.items()} == {
        "a": ((2,), 0, 8),
        "b": ((1, 2), 8, 12),
    }


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("a", entry(0, 8)), ("a", entry(0, 8))], "the key 'a' comes twice"),
        ([("a", entry(0, 8)), ("b", entry(4, 12))], "tensor 'b' must begin at byte 8 of the data"),
        ([("a", entry(0, 8)), ("b", entry(12, 20))], "tensor 'b' must begin at byte 8 of the data"),
        ([("a", entry(0, 4, (1,)))], "its data must be 4 bytes, got 8"),
        ([("a", entry(0, 16, (4,)))], "its data must be 16 bytes, got 8"),
        ([("a", entry(0, 4))], "tensor 'a' must have 8 bytes, got 4"),
        ([("a", entry(8, 0))], "tensor 'a' must have 8 bytes, got -8"),
        ([("a", entry(0, 8, (1 << 62, 1 << 62)))], "tensor 'a' must have 8.50706e+37 bytes"),
        ([("a", entry(0, 8, (-2,)))], "tensor 'a' must have a shape of at most 8 counts"),
        ([("a", entry(0, 8, (1,) * 9))], "tensor 'a' must have a shape of at most 8 counts"),
        ([("a", entry(0, 8, "2"))], "tensor 'a' must have a shape of at most 8 counts"),
        ([("a", {"dtype": "F32", "shape": [2]})], "must have a dtype, a shape and data_offsets"),
        ([("a", entry(0, 8, (2,), []))], "must be one of F32, F16, BF16, got []"),
        ([("a", [])], "must have a dtype, a shape and data_offsets"),
    ],
)
def test_a_header_that_lies_is_refused_with_the_numbers(
    entries: list[tuple[str, object]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_header(header(tmp_path, *entries))
    assert message in str(caught.value)


def test_a_header_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((1 << 24).to_bytes(8, "little"))
        file.truncate(1 << 25)  # a file with a hole, which takes no room
    with pytest.raises(CheckpointError, match="its header must be 1 to 8388608 bytes"):
        read_header(path)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 200_000, b'{"a":1,"a":2}'])
def test_json_that_is_deep_or_says_a_thing_twice_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        read_object(path)


def test_json_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate((1 << 24) + 1)
    with pytest.raises(CheckpointError, match="must have at most 16777216 bytes, got 16777217"):
        read_object(path)


def overlapping(file: GGUF) -> None:
    file.tensors[1] = (*file.tensors[1][:3], file.tensors[0][3])


def repeated(file: GGUF) -> None:
    file.values.append(file.values[0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (overlapping, r"tensors '\w+.weight' and '\w+.weight' overlap"),
        (repeated, "has the key 'general.architecture' twice"),
    ],
)
def test_a_gguf_file_says_nothing_twice(spoil: object, message: str, tmp_path: Path) -> None:
    file = make_gguf()
    assert callable(spoil)
    spoil(file)
    path = tmp_path / "a.gguf"
    path.write_bytes(file.to_bytes())
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kind", [0, 99])
def test_a_long_name_makes_no_long_sentence(kind: int, tmp_path: Path) -> None:
    file = make_gguf()
    file.tensors[0] = (b"x" * 100_000, [32], kind, 0)
    path = tmp_path / "a.gguf"
    path.write_bytes(file.to_bytes())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, cache_dir=tmp_path / "cache")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": 3}, "layer_types must name full_attention"),
        ({"layer_types": [["full_attention"]]}, "layer_types must name full_attention"),
        ({"layer_types": None, "max_window_layers": "0"}, "max_window_layers must be an integer"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, got 1000"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be a positive number, got inf"),
        ({"hidden_size": 1 << 63}, "hidden_size must be a positive integer, got 9223"),
        ({"eos_token_id": [1 << 63]}, "token ids must be non-negative integers"),
    ],
)
def test_a_configuration_of_other_types_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = make_folder("qwen2")
    folder.config |= changes
    write(tmp_path, folder.to_files())
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)
