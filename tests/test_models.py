"""The models that chapters measure: what can be asked of them without TensorRT. That they build and run, the receipts show."""

from importlib.util import find_spec

import pytest

from launchlab.lab import models


def test_heads_must_divide_the_hidden_size():
    with pytest.raises(ValueError, match="不能被 heads = 3 整除"):
        models.bert(None, hidden=64, heads=3)


@pytest.mark.parametrize("part", ["det", "rec", "cls"])
def test_a_missing_ocr_package_is_named_with_its_cure(tmp_path, monkeypatch, part):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="pip install rapidocr-onnxruntime"):
        models.ppocr(part)


@pytest.mark.parametrize("part", ["det", "rec", "cls"])
def test_ocr_files_are_found_without_importing_their_package(tmp_path, monkeypatch, part):
    package = tmp_path / "rapidocr_onnxruntime"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "models" / models.PPOCR_FILES[part]).write_bytes(b"")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert models.ppocr(part).parent == package / "models"
    assert find_spec("rapidocr_onnxruntime").origin == str(package / "__init__.py")


def test_another_part_is_no_model():
    with pytest.raises(KeyError, match="lines"):
        models.ppocr("lines")
