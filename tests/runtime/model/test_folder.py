"""Finding a model: the pocket model, folders, hub ids; without the network."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from holdfast.runtime.errors import ModelUnreadable
from holdfast.runtime.model.folder import HUB_FILES, find_model


def test_the_pocket_is_in_the_package() -> None:
    folder = find_model("pocket")
    assert folder.parts[-2:] == ("runtime", "pocket")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert find_model("~/mine") == tmp_path / "mine"


@pytest.mark.parametrize(
    "name", ["no-such", "./a/b", "/no/such/folder", "a/b/c", "", "a b/c", "x" * 5000, "a\0b"]
)
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnreadable):
        find_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelUnreadable, match="empty, not a GGUF file"):
        find_model(str(tmp_path / "model.gguf"))


def test_a_hub_id_is_fetched_without_other_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: asked.update(options, name=name) or tmp_path,
    )
    assert find_model("Qwen/Qwen3-0.6B") == tmp_path
    assert asked == {
        "name": "Qwen/Qwen3-0.6B",
        "allow_patterns": list(HUB_FILES),
        "ignore_patterns": ["*/*"],
    }


def test_offline_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelUnreadable, match=r"owner/model: .* the hub cannot be reached") as caught:
        find_model("owner/model")
    assert "\n" not in caught.value.message


def answered(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response = httpx.Response(status, request=httpx.Request("GET", "http://hub"))
    return kind("no", response=response)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (answered(errors.GatedRepoError, 403), "asks for a login"),
        (answered(errors.RepositoryNotFoundError, 404), "no such folder, and the hub has no such model"),
        (answered(errors.HfHubHTTPError, 500), "cannot be reached"),
        (httpx.ReadTimeout("late"), "cannot be reached: late"),
        (errors.HFValidationError("odd"), "not a hub id"),
        (OSError("disk\nfull"), "cannot be reached: disk full"),
    ],
)
def test_failures_of_the_hub(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelUnreadable, match=words):
        find_model("owner/model")
