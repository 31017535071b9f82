"""Classification as a study: batches, missing labels, draws at test, floors, the table."""

import dataclasses

import numpy as np
import pytest
import torch
from sparseattn.lab import classify
from sparseattn.lab.study import records, train, units
from torch import nn

SETTINGS = {
    "batch": (8, 8, 8, 8, "-"),
    "steps": (60, 60, 60, 60, "-"),
    "epoch": (20, 20, 20, 20, "-"),
    "rates": ([3e-2],) * 4 + ("-",),
    "seeds": (2, 2, 2, 2, "-"),
}
ROWS = {
    "constant": dict(floor=True, rule="constant"),
    "random": dict(floor=True, rule="random", seeds=2),
    "linear": dict(floor=True, rule="linear", features="raw", options=dict(C=10.0)),
    "untrained": dict(floor=True, untrained="network"),
    "network": {},
}


def items(count, seed, classes=3):
    """Points (count, 2); the label is the third of the circle they lie in."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, ((torch.atan2(x[:, 1], x[:, 0]) / (2 * torch.pi) + 0.5) * classes).long().clamp(max=classes - 1)


def load(setting):
    return {
        "sources": ["points"],
        "train": items(100, 0),
        "val": items(40, 1),
        "test": items(60, 2),
        "far": items(30, 3),
    }


def network(row, setting, data):
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))


def study(rows=ROWS, load=load, network=network, **options):
    features = {"raw": lambda x, setting: x.numpy()}
    return classify.classification(
        "toy", "thirds of a circle", rows, SETTINGS, load, network, features=features, **options
    )


def steps(made, seed=0, epochs=(0, 1, 2)):
    setting = made.at("cpu")
    return [b for epoch in epochs for b in made.batches("network", setting, load(setting), seed, epoch)]


def test_a_pass_sees_no_item_twice_and_seeds_differ():
    first = steps(study())
    assert len(first) == 60 and {len(b["labels"]) for b in first} == {8}
    passes = 100 // 8
    for start in (0, passes):
        seen = torch.cat([b["inputs"] for b in first[start : start + passes]])
        assert len(seen.unique(dim=0)) == passes * 8
    assert not torch.equal(first[0]["inputs"], first[passes]["inputs"])
    assert not torch.equal(first[0]["inputs"], steps(study(), seed=1)[0]["inputs"])
    assert [b["progress"] for b in first] == [i / 60 for i in range(60)]


def test_augmentation_depends_on_seed_and_step_alone():
    made = study(augment=lambda x, g: x + torch.rand(x.shape, generator=g))
    whole, later = steps(made), steps(made, epochs=(2,))
    assert all(torch.equal(a["inputs"], b["inputs"]) for a, b in zip(whole[40:], later, strict=True))
    plain = steps(study())
    moves = [a["inputs"] - b["inputs"] for a, b in zip(whole, plain, strict=True)]
    assert not torch.equal(moves[0], moves[1]) and min(m.min() for m in moves) >= 0
    assert all(torch.equal(a["labels"], b["labels"]) for a, b in zip(whole, plain, strict=True))


def test_fewer_items_than_a_batch():
    small = lambda setting: load(setting) | {"train": items(5, 0)}  # noqa: E731
    made = study(load=small)
    assert len(next(made.batches("network", made.at("cpu"), small(None), 0, 0))["labels"]) == 5


def test_records_floors_and_the_table(tmp_path):
    found = records(study(), "smoke", root=tmp_path)
    assert found.parts() == ["test", "far"] and found.floors() == ["constant", "random", "linear", "untrained"]
    table = classify.accuracies(found, {"network": 91.0}, beside={"network": ("untrained",)}).set_index("row")
    assert table["paper"]["network"] == 91.0 and table["seeds"]["network"] == 2 == table["seeds"]["random"]
    assert table["ours"]["network"] > 70 > table["ours"]["constant"] and table["clears"]["constant"] == "a floor"
    assert table["over"].to_dict() == {
        "constant": "items", "random": "seeds and items", "linear": "items", "untrained": "items only",
        "network": "seeds and items",
    }  # fmt: skip
    assert len(found.outcomes("network", "far")[0]) == 30 and found.outcomes("network", "test")[0].dtype == bool
    assert set(found.of("network")[0]["curve"][0]) >= {"accuracy", "cross-entropy", "loss"}
    made = classify.experiment(found, "network", "linear", part="far")
    assert set(made.floors) == {"constant", "random", "linear"} and made.interval.items == 30


def test_a_table_without_records_has_its_columns_and_one_rule_is_a_floor(tmp_path):
    found = records(study(), "cpu", root=tmp_path)
    assert classify.accuracies(found).columns.tolist() == [
        "row", "paper", "ours", "low", "high", "over", "seeds", "clears", "steps", "parameters"
    ]  # fmt: skip
    train(units(study(), "cpu", rows=["constant"], root=tmp_path)[0])
    table = classify.accuracies(records(study(), "cpu", root=tmp_path))
    assert table[["row", "clears"]].to_numpy().tolist() == [["constant", "a floor"]]


def test_a_row_below_its_floor_says_so(tmp_path):
    idle = dataclasses.replace(study(), loss=lambda model, batch, g: 0 * sum(p.sum() for p in model.parameters()))
    table = classify.accuracies(records(idle, "smoke", root=tmp_path)).set_index("row")
    assert table["clears"]["network"].startswith("no: ") and "linear" in table["clears"]["network"]


def test_a_floor_without_a_record_is_not_cleared(tmp_path):
    """A trained floor, or a rule, that has no record: the table says so, and no claim passes."""
    rows = ROWS | {"no attention": {}}
    there = units(study(rows), "cpu", rows=["constant", "random", "linear", "network"], root=tmp_path)
    for unit in there:
        train(unit)
    found, beside = records(study(rows), "cpu", root=tmp_path), {"network": ("no attention",)}
    clears = classify.accuracies(found, beside=beside).set_index("row")["clears"]
    made = classify.experiment(found, "network", beside=beside["network"])
    if made.short["network"]:
        assert clears["network"] == "no: " + ", ".join(made.short["network"])
    assert made.missing == ("no attention",) and made.below["network"][-1] == "no attention (no record)"
    both = classify.experiment(found, "network", "constant", beside=beside)
    assert both.missing == ("no attention",) and both.spared == {"network": [], "constant": ["no attention"]}
    assert made.verdict(100 * np.mean(found.means("network", "test")), tolerance=50).verdict == "undecided"
    weak = dataclasses.replace(found, found=[r for r in found.found if r["row"] in ("constant", "network")])
    assert classify.experiment(weak, "network").missing == ("random", "linear")
    clears = [classify.accuracies(weak, beside=more).set_index("row")["clears"] for more in (None, beside)]
    assert clears[0]["network"] == "rules only; no record of random, linear" and clears[0]["constant"] == "a floor"
    assert clears[1]["network"] == "rules only; no record of random, linear, no attention"


def test_labels_of_parts_and_missing_ones(tmp_path):
    """Points of a cloud are labelled each; what has no label is neither trained nor tested."""

    def clouds(count, seed):
        x, y = items(count * 6, seed)
        y = y.view(count, 6).clone()
        y[:, 4:] = -1
        return x.view(count, 6, 2), y

    parts = {"sources": ["clouds"], "train": clouds(50, 0), "val": clouds(20, 1), "test": clouds(30, 2)}
    found = records(study(load=lambda setting: parts), "smoke", root=tmp_path)
    assert all(len(found.outcomes(row, "test")[0]) == 30 * 4 for row in ROWS)
    assert found.means("network", "test")[0] > 0.7 and found.means("linear", "test")[0] > 0.6
    assert classify.cross_entropy(torch.tensor([[2.0, 0.0], [0.0, 9.0]]), torch.tensor([0, -1])) == pytest.approx(
        np.log(1 + np.exp(-2)), rel=1e-5
    )


class Draws(nn.Module):
    """Inputs are named; noise is added in training and outside."""

    def __init__(self):
        super().__init__()
        self.out, self.heat = nn.Linear(2, 3), 1.0

    def forward(self, x, size):
        return (self.out(x) + torch.randn(len(x), 3))[:, None] * size[:, None, None]


def test_named_inputs_own_loss_own_scores_and_draws(tmp_path):
    def named(setting):
        found = load(setting)
        return found | {p: ({"x": found[p][0], "size": torch.ones(len(found[p][1]))}, found[p][1])
                        for p in ("train", "val", "test", "far")}  # fmt: skip

    heats = []

    def anneal(model, progress):
        model.heat = 1 - progress
        heats.append(model.heat)

    made = study({"constant": ROWS["constant"], "network": {}}, named, lambda *_: Draws(), anneal=anneal,
                 loss=lambda output, y: classify.cross_entropy(output, y[:, None]), scores=lambda output: output[:, 0])
    (unit,) = units(made, "smoke", rows=["network"], seeds=[0], root=tmp_path)
    record = train(unit)
    assert heats == [1 - i / 60 for i in range(60)]
    data = named(None)
    model = Draws()
    before = torch.get_rng_state()
    one, two = (made.test(model, made.at("smoke"), data)["test"] for _ in range(2))
    assert (one == two).all() and torch.equal(torch.get_rng_state(), before)
    assert record["outcomes"].keys() == {"test", "far"}


def test_a_study_judges_in_its_own_way_and_groups_are_drawn_whole(tmp_path):
    """Answers of six items of a set are put to the vote; sets belong to groups."""

    def judge(part, said, labels, data):
        right = said.reshape(-1, 6) == labels.reshape(-1, 6)
        return {part: right.sum(1) > 3, f"_{part}": np.arange(len(right)) // 2, "all": right.flatten()}

    parts = {name: load(None)[name] for name in ("sources", "train", "val", "test")}
    rows = {row: ROWS[row] for row in ("constant", "untrained", "network")}
    made = study(rows, judge=judge, load=lambda setting: parts)
    found = records(made, "smoke", root=tmp_path)
    assert found.parts() == ["test", "all"] and set(found.rows()) == {"constant", "untrained", "network"}
    assert all(len(found.outcomes(row, "test")[0]) == 10 for row in found.rows())
    over = classify.experiment(found, "network").interval
    assert over.items == 5 and classify.experiment(found, "network", part="all").interval.items == 60
    assert over.value == 100 * np.mean(found.means("network", "test"))


def test_rows_see_the_data_of_their_task_only(tmp_path):
    """Two tasks with other labels: each is learned, and scored on its own items."""

    class Of(nn.Sequential):
        task = ""

    def load_both(setting):
        return {"sources": ["points"], "thirds": load(setting), "halves": {
            part: (x, (x[:, 0] > 0).long()) for part, (x, _) in list(load(setting).items())[1:]}}

    rows = {f"{task}: {name}": options | {"task": task} for task in ("thirds", "halves")
            for name, options in {"constant": ROWS["constant"], "network": {}}.items()}

    def one(row, setting, data):
        made = Of(*network(row, setting, data))
        made.task = rows[row]["task"]
        return made

    found = records(classify.by_task(study(rows, load_both, one)), "smoke", root=tmp_path)
    right = {row: np.mean(found.means(row, "test")) for row in found.rows()}
    assert right["halves: network"] > 0.9 and right["thirds: network"] > 0.7
    halves = load_both(None)["halves"]
    most = halves["train"][1].bincount().argmax()
    assert right["halves: constant"] == (halves["test"][1] == most).double().mean()
