"""A study of seconds: two groups of points on a line."""

import os
import time

import torch
from sparseattn.lab.study import Study
from torch import nn

ROWS = {"majority": dict(floor=True), "linear": dict(hidden=0), "hidden layer": dict(hidden=8)}
RATES = [1e-1] if os.environ.get("TOY_PROBES") == "no" else [1e-1, 1e-2]
SETTINGS = {"steps": (12, 60, 60, 60, "-"), "epoch": (4, 20, 20, 20, "-"), "rates": (RATES,) * 4 + ("-",),
            "probe": (2, 4, 4, 4, "-"), "seeds": (1, 2, 2, 2, "-"), "minutes": (0, 1, 1, 1, "-")}


def data(setting):
    x = torch.rand(400, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"sources": ["points on a line"], "x": x, "y": (x.abs().flatten() < 0.4).long()}


def network(row, setting, data):
    width = ROWS[row]["hidden"]
    return nn.Sequential(nn.Linear(1, width), nn.Dropout(0.1), nn.Linear(width, 2)) if width else nn.Linear(1, 2)


def batches(row, setting, data, seed, epoch):
    g = torch.Generator().manual_seed(1000 * seed + epoch)
    for _ in range(setting["epoch"]):
        time.sleep(float(os.environ.get("TOY_SECONDS", 0)))
        take = torch.randint(200, (32,), generator=g)
        yield data["x"][take], data["y"][take]


def loss(model, batch, generator):
    if os.environ.get("TOY_FAILS"):
        raise ValueError("the toy was told to fail")
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def right(model, data, part):
    with torch.no_grad():
        return (model(data["x"][part]).argmax(1) == data["y"][part]).numpy()


def validate(model, setting, data):
    return {"accuracy": right(model, data, slice(200, 300)).mean()}


def test(model, setting, data):
    return {"test": right(model, data, slice(300, 400))}


def floor(row, setting, data, seed):
    return {"test": (data["y"][300:] == data["y"][:200].mode().values).numpy()}


def missing(setting):
    return os.environ.get("TOY_MISSING", "")


STUDY = Study("toy", "two groups on a line", ROWS, SETTINGS, data, network, batches, loss, validate, test, floor,
              missing=missing)
