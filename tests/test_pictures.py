"""workflow/pictures.py: fewer bytes, the same picture."""

import base64
import hashlib
import io
import json

import numpy as np
import pictures
import pytest
from PIL import Image


def png(pixels, **options):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1, **options)
    return file.getvalue()


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


@pytest.fixture
def blend():
    """A white page with two lines of one colour each and a patch of all hues: 40,000 colours."""
    page = np.full((300, 400, 4), 255, np.uint8)
    page[20:24, :, :3], page[30:34, :, :3] = (0, 114, 178), (213, 94, 0)
    page[50:250, 100:300, 0], page[50:250, 100:300, 1] = np.meshgrid(np.arange(200), np.arange(200))
    page[50:250, 100:300, 2] = np.random.default_rng(0).integers(100, 120, (200, 200))
    return page


@pytest.mark.parametrize("channels", (3, 4))
def test_few_colours_lose_nothing(blend, channels):
    flat = np.where(blend[..., :1] == 255, 255, 40).repeat(channels, -1).astype(np.uint8)
    flat[..., 3:] = 255
    data = png(flat, dpi=(150, 150))
    found = pictures.small(data)
    assert len(found) < len(data) and (decoded(found) == decoded(data)).all()
    assert round(Image.open(io.BytesIO(found)).info["dpi"][0]) == 150


def test_many_colours_lose_little(blend):
    data = png(blend)
    found = pictures.small(data)
    off = np.abs(decoded(found) - decoded(data))
    assert len(found) < len(data) / 2 and off.max() <= 24
    assert not off[:50].any(), "the commonest colours stay"
    assert pictures.small(found) == found, "treated once"


def test_transparent_pictures_stay(blend):
    blend[0, 0, 3] = 0
    assert pictures.small(png(blend)) == png(blend)


def test_files_their_digests_and_outputs_are_treated_alike(blend, tmp_path):
    data = png(blend)
    (tmp_path / "one.png").write_bytes(data)
    (tmp_path / "run.json").write_text(json.dumps(dict(files={"one.png": "old", "table.csv": "kept"}, scale="cpu")))
    pictures.small_files(tmp_path)
    found = (tmp_path / "one.png").read_bytes()
    run = json.loads((tmp_path / "run.json").read_text())
    assert found == pictures.small(data)
    assert run == dict(files={"one.png": hashlib.sha256(found).hexdigest(), "table.csv": "kept"}, scale="cpu")
    outputs = [dict(data={"image/png": base64.b64encode(data).decode(), "text/plain": "x"}), dict(text="é")]
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps(dict(cells=[dict(source="s"), dict(source="c", outputs=outputs)])))
    pictures.small_outputs(path)
    outputs[0]["data"]["image/png"] = base64.b64encode(found).decode()
    assert json.loads(path.read_text())["cells"][1]["outputs"] == outputs
