"""The arena of five tasks: what rows change, what rules see, which rows are off, which expressions are for the test."""

import gzip
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sparseattn.data.sequences import listops_decode, listops_encode, listops_solve, load_task
from sparseattn.lab.decide import Experiment
from sparseattn.lab.study import records
from sparseattn.samsa.models import EqualScores, SequenceNetwork, inference_modes, sampling_layers
from sparseattn.sbm.models import density
from sparseattn.studies import (
    _arena,
    arena_image,
    arena_listops,
    arena_pathfinder,
    arena_retrieval,
    arena_text,
    convolved_listops,
    names,
)
from sparseattn.studies._arena import CONTROLS, FEATURES, LENGTH, METHODS, TASKS

STUDIES = {"listops": arena_listops.STUDY, "image": arena_image.STUDY, "text": arena_text.STUDY,
           "retrieval": arena_retrieval.STUDY, "pathfinder": arena_pathfinder.STUDY}
SETTING = {task: study.at("smoke") for task, study in STUDIES.items()}


@pytest.fixture(scope="module")
def data():
    return {task: study.data(SETTING[task]) for task, study in STUDIES.items()}


@pytest.fixture(scope="module")
def built(data):
    def network(task, row, **changed):
        torch.manual_seed(0)
        return STUDIES[task].network(row, SETTING[task] | changed, data[task]).eval()

    return network


def test_every_task_has_a_study_of_its_own(data):
    assert tuple(STUDIES) == TASKS and {f"arena_{task}" for task in TASKS} <= set(names()) and "_arena" not in names()
    for task, study in STUDIES.items():
        assert study.name == f"arena_{task}" and set(_arena.methods(task)) <= set(study.rows)
        assert study.at("cpu")["steps"] >= 3000 or data[task]["_sizes"][0] == 257          # bytes take more time a step
        net = study.network("full", SETTING[task], data[task]).eval()
        assert len(study.test(net, SETTING[task], data[task])["test"]) == 16


@pytest.mark.parametrize("task", TASKS)
def test_the_paper_s_network_is_the_other_one(task, data, built):
    shared, paper = built(task, "soft 256"), built(task, "soft 256", network="SBM-Transformer")
    assert isinstance(shared.network, SequenceNetwork) and not isinstance(paper.network, SequenceNetwork)
    assert paper.multiplier == 1 and len(paper.encoder.layers) == 1
    inputs, _ = data[task]["test"]
    for net in (shared, paper):
        assert net(**inputs).shape == (16, data[task]["_sizes"][1])
        assert _arena.updates(net, inputs).shape == (1,) and (_arena.updates(net, inputs) > 0).all()


def test_only_the_paper_s_recipe_has_no_limit_on_gradients():
    for study in STUDIES.values():
        clips = {scale: study.at(scale)["clip"] for scale in ("smoke", "cpu", "gpu", "paper")}
        assert clips == dict(smoke=2.0, cpu=2.0, gpu=2.0, paper=None)


def test_rows_sample_the_paper_s_share_of_their_sequences(data, built):
    for task in TASKS:
        for row in ("hard 128", "soft 512"):
            layer, share = sampling_layers(built(task, row))[0], METHODS[row]["samples"] / LENGTH[task]
            assert layer.samples == max(2, round(share * data[task]["_sizes"][2])) and layer.hard == (row == "hard 128")


def test_rows_start_and_are_tested_as_they_say(data, built):
    modes = {row: inference_modes(built("image", row)) for row in METHODS}
    assert modes["hard 256"] == ["top-k", "noise"] and modes["soft 256"] == ["mixed", "top-k", "noise"]
    assert not any(modes[row] for row in ("random 256", "full", "SBM", "Performer"))
    assert isinstance(sampling_layers(built("text", "random 256"))[0].importance, EqualScores)
    assert [built("text", f"hard 256{more}").multiplier for more in ("", ", from 0")] == [1, 0]
    found = STUDIES["image"].test(built("image", "soft 256"), SETTING["image"], data["image"])
    assert list(found) == ["test", "top-k", "noise"]


def test_random_masks_are_a_quarter_and_stay_so(data, built):
    net, (inputs, labels) = built("listops", "random masks"), data["listops"]["train"]
    layer = net.encoder.layers[0].attention
    before = layer.clusters.clone()
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 1.0)
    _arena.loss(net, {"inputs": inputs, "labels": labels}, None).backward()
    optimiser.step()
    assert torch.equal(layer.clusters, before) and layer.query.weight.grad is not None
    densities = torch.stack([density(net(**inputs, return_info=True)[1]) for _ in range(5)])
    assert (densities.mean() - 0.25).abs() < 0.02
    assert not torch.equal(built("listops", "SBM").encoder.layers[0].attention.clusters, before)


def test_the_regulariser_pulls_densities_down(data, built):
    net, (inputs, labels) = built("image", "SBM, weight 0.1"), data["image"]["train"]
    found = {}
    for net.weight in (0.0, 0.1):
        torch.manual_seed(0)
        found[net.weight] = _arena.loss(net, {"inputs": inputs, "labels": labels}, None)
    torch.manual_seed(0)
    dense = density(net(**inputs, return_info=True)[1])
    assert torch.isclose(found[0.1], found[0.0] + 0.1 * dense)
    assert torch.autograd.grad(dense, net.encoder.layers[0].attention.clusters)[0].abs().sum() > 0


def test_padding_changes_no_answer(data, built):
    for task, places in (("text", (2,)), ("retrieval", (2, 2))):
        net, tokens = built(task, "full"), data[task]["train"][0]["tokens"][:2]
        lengths = torch.full(places, 40)
        other = tokens.clone()
        other[..., 40:] = 7
        assert torch.equal(net(tokens, lengths), net(other, lengths))


def test_updates_are_what_attention_adds(data, built):
    net, inputs = built("listops", "full"), data["listops"]["test"][0]
    seen = []
    handle = net.encoder.layers[0].register_forward_pre_hook(lambda layer, given: seen.append(given[0]))
    net(**inputs)
    handle.remove()
    layer, mask = net.encoder.layers[0], torch.arange(inputs["tokens"].shape[1]) < inputs["lengths"][:, None]
    added = layer.attention(layer.norm1(seen[0]), None, mask)
    with torch.no_grad():
        expected = (added.norm(dim=-1) / seen[0].norm(dim=-1))[mask].mean()
        assert torch.isclose(_arena.updates(net, inputs)[0], expected)
        net.encoder.alpha.mul_(0.25)
        assert torch.isclose(_arena.updates(net, inputs)[0], expected / 4)
        net.encoder.alpha.fill_(1)
    assert _arena.updates(built("listops", "no attention"), inputs).abs().sum() == 0


def test_what_rules_see():
    tokens = torch.tensor([[*listops_encode("[MAX 2 3 [MIN 9 9 ] ]"), 0], [*listops_encode("[SM [MIN 9 9 ] 7 8 ]"), 0]])
    inputs = {"tokens": tokens.byte(), "lengths": torch.tensor([8, 8])}
    assert FEATURES["first"](inputs, None).tolist() == [12, 14]
    assert FEATURES["root"](inputs, None).tolist() == [1203, 1405]
    assert FEATURES["pairs"](inputs, None).getnnz(axis=1).tolist() == [13, 13]
    pages = {"tokens": torch.zeros(1, 2, 8, dtype=torch.uint8), "lengths": torch.tensor([[5, 5]])}
    for page, text in zip(pages["tokens"][0], (b"ab cd", b"cd ef"), strict=True):
        page[:5] = torch.tensor(list(text)) + 1
    assert FEATURES["shared"](pages, None).tolist() == [[1 / 3]]
    counts = FEATURES["bytes"](pages, None)
    assert np.isclose(np.expm1(counts.data).sum(), 10) and counts.getnnz() == 7


def test_official_expressions_are_test_alone(tmp_path, monkeypatch):
    small = dict(source="generated", train=200, val=20, test=8, max_depth=4, max_args=3, min_length=3, max_length=9)
    task = load_task("listops", progress=False, **small)
    texts = [listops_decode(row) for row in task.train.tokens[:30].tolist()]
    (tmp_path / "listops_nyu").mkdir()
    with gzip.open(tmp_path / "listops_nyu/test_d20s.tsv.gz", "wt") as file:
        file.write("label\ttext\n9\t9\n")
        labels = task.train.labels[:30].tolist()
        file.writelines(f"{label}\t( {text} )\n" for label, text in zip(labels, texts, strict=True))
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    beside = _arena.load("listops", SETTING["listops"] | {"data": small, "official test": "beside"})
    made = _arena.load("listops", SETTING["listops"] | {"data": small, "official test": True})
    assert len(beside["test"][1]) == 8 and torch.equal(beside["official"][1], made["test"][1])
    assert torch.equal(beside["train"][0]["tokens"], made["train"][0]["tokens"])
    assert "also on 30" in beside["sources"][0]
    (test, labels), (fresh, _) = made["test"], made["train"]
    assert len(labels) == 30 and "30 official expressions" in made["sources"][0]
    found = zip(test["tokens"].numpy(), test["lengths"].tolist(), strict=True)
    assert [listops_solve(row[:n]) for row, n in found] == labels.tolist()
    rows = {row.tobytes() for row in test["tokens"].numpy()}
    assert 0 < len(fresh["tokens"]) <= 170 and not rows & {row.tobytes() for row in fresh["tokens"].numpy()}


def test_batches_of_similar_lengths():
    """A pass has every item once, in batches cut to their longest; other seeds and passes have others."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (230,), generator=g)
    tokens = torch.arange(230)[:, None].expand(230, 40)
    data, setting = {"train": ({"tokens": tokens, "lengths": lengths}, torch.arange(230))}, {"batch": 8, "epoch": 7}
    first = [batch for epoch in range(4) for batch in _arena.similar("full", setting, data, 0, epoch)]
    seen = torch.cat([batch["labels"] for batch in first])
    assert len(seen) == len(seen.unique()) == 224 and len(first) == 28
    for batch in first:
        assert torch.equal(batch["inputs"]["lengths"], lengths[batch["labels"]])
        assert batch["inputs"]["tokens"].shape[1] == batch["inputs"]["lengths"].max()
        assert (batch["inputs"]["tokens"] == batch["labels"][:, None]).all()
    assert sum(batch["inputs"]["tokens"].numel() for batch in first) < 1.2 * lengths[seen].sum()
    again = next(_arena.similar("SBM", setting, data, 0, 0))["labels"]
    assert torch.equal(again, first[0]["labels"])
    assert not torch.equal(again, next(_arena.similar("full", setting, data, 1, 0))["labels"])
    assert not torch.equal(again, next(_arena.similar("full", setting, data, 0, 4))["labels"])


def test_rows_behind_a_convolution():
    """The convolution sees no padding, the row without attention keeps it, the untrained floor has it too."""
    study = convolved_listops.STUDY
    setting = study.at("smoke")
    data = study.data(setting)
    assert "convolved_listops" in names() and set(study.rows) < set(arena_listops.STUDY.rows)
    assert study.planned("cpu")["full"] == 3 and study.at("cpu")["network"] == study.at("paper")["network"] == "shared"
    inputs = {name: x[:3] for name, x in data["test"][0].items()}
    inputs["lengths"] = torch.tensor([5, 9, 12])
    other = inputs["tokens"].clone()
    for place, n in zip(other, inputs["lengths"], strict=True):
        place[n:] = 1
    for row in ("no attention", "full", "hard 256", "SBM"):
        net = study.network(row, setting, data).eval()
        answers = []
        for tokens in (inputs["tokens"], other):
            torch.manual_seed(0)
            answers.append(net(tokens, inputs["lengths"]))
        assert torch.equal(answers[0], answers[1])
        layer = net.encoder.layers[0]
        assert isinstance(layer, _arena.BehindConvolution) and layer.attention is layer.layer.attention
        torch.nn.init.zeros_(layer.filters.weight), torch.nn.init.zeros_(layer.filters.bias)
        torch.manual_seed(0)
        plain = _arena.network("listops", row, setting, data).eval()
        first = "network.encoder.layers.0."
        plain.load_state_dict({name.replace(".layer.", "."): x for name, x in net.state_dict().items()
                               if not name.startswith((f"{first}filters.", f"{first}norm."))})
        answers = []
        for one in (net, plain):
            torch.manual_seed(0)
            answers.append(one(**inputs))
        torch.testing.assert_close(*answers)
        if row == "full":       # without its convolution a layer adds what it adds alone
            torch.testing.assert_close(_arena.updates(net, inputs), _arena.updates(plain, inputs))
    torch.manual_seed(100)
    expected = study.test(study.network("full", setting, data).eval(), setting, data)["test"]
    assert np.array_equal(study.floor("untrained", setting, data, 0)["test"], expected)


def test_missing_files_are_named(monkeypatch):
    monkeypatch.setenv("SPARSEATTN_DATA", "nowhere")
    said = {task: STUDIES[task].missing(STUDIES[task].at("cpu")) for task in TASKS}
    assert "listops_nyu" in said["listops"] and all(task in said[task] for task in ("image", "text"))
    assert said["pathfinder"] == "" and not any(STUDIES[task].missing(SETTING[task]) for task in TASKS)


def test_what_is_off_is_said_and_left_out(tmp_path):
    rows = ("no attention", "full", "hard 256, from 0", "SBM, weight 0.1")
    study = _arena.part(STUDIES["image"], *rows)
    assert set(study.rows) == {*rows, *(row for row, options in _arena.FLOORS["image"].items() if "rule" in options)}
    found = records(study, "smoke", root=tmp_path)
    table = _arena.standing(found, {"full": 40.0}).set_index("row")
    assert table["clears"]["hard 256, from 0"].startswith("off") and table["clears"]["constant"] == "a floor"
    assert not table["clears"]["full"].startswith("off") and not table["clears"]["no attention"].startswith("off")
    assert table["paper"]["full"] == 40 and table["update"]["full"] > 0.01
    assert table["multiplier"]["hard 256, from 0"] < 0.01
    assert table["density"]["full"] == 1 and 0.2 < table["density"]["SBM, weight 0.1"] < 0.3
    off, lacking = _arena.worth(found, [("hard 256, from 0", "no attention"), ("full", "SBM")])
    assert off["withheld because"].startswith("the attention of hard 256, from 0 is off") and np.isfinite(off["points"])
    assert lacking["withheld because"] == "no record of SBM" and np.isnan(lacking["points"])
    kept = found.first("SBM, weight 0.1")["drawn"]
    shapes = {name: kept[name]["shape"] for name in ("attended", "items", "losses")}
    assert shapes == {"attended": [16, 2, 64], "items": [16, 1], "losses": [16]}
    assert "no attention" in CONTROLS and "full" not in CONTROLS
    assert [row for row in rows if _arena.idle(found, row)] == ["hard 256, from 0"]
    decided = {}
    run = SimpleNamespace(scale="smoke", decide=lambda id, **facts: decided.setdefault(id, facts["evidence"]))
    _arena.gain(run, found, "X", "hard 256, from 0", "full"), _arena.level(run, found, "Y", "full", 40.0)
    assert "the attention of hard 256, from 0 is off" in decided["X"] and "off" not in decided["Y"]
    run = SimpleNamespace(scale="smoke", decide=lambda id, needs, **facts: needs)
    assert _arena.gain(run, found, "X", "full", "no attention") == "smoke"
    assert _arena.gain(run, found, "X", "full", "no attention", needs="paper") == "paper"


def test_what_rows_pass_is_counted():
    lines = [("rule", 40.0, "a floor"), ("lower rule", 20.0, "a floor"), ("untrained", 50.0, "a floor"),
             ("no attention", 30.0, "no: rule"), ("full", 35.0, "no: rule"), ("SBM", 45.0, "yes"),
             ("hard 256", 30.0, "no: rule, no attention"), ("soft 256", 60.0, "off: attention adds less than 1 %")]
    table = pd.DataFrame(lines, columns=["row", "ours", "clears"]).assign(seeds=3)
    assert _arena.best_rule(table) == ("rule", 40.0)
    said = "two standard errors above the best rule (rule, 40.0 %): SBM, one of 4 rows with attention"
    assert _arena.passed(table) == f"{said}; 2 above the network without attention"
    assert _arena.passed(table.drop(index=3)) == said
    some = table.drop(index=3).assign(seeds=[1, 1, 1, 1, 3, 3, 1])
    assert _arena.passed(some) == f"{said}; 2 were trained once, so that only test items are told apart"
    assert _arena.passed(table[:3]) == "only floors so far, the best rule is rule, 40.0 %"
    assert _arena.passed(table.drop(index=[3, 5])).endswith(": none of 3 rows with attention")
    more = table.assign(clears=table["clears"].replace("no: rule", "yes"))
    assert _arena.passed(more.drop(index=3)).endswith(": full, SBM of 4 rows with attention")


def test_a_difference_is_withheld_for_what_either_row_does_not_clear(monkeypatch):
    right, found = np.arange(100) < 80, SimpleNamespace(rows=lambda: ["full", "random masks"])
    monkeypatch.setattr(_arena, "idle", lambda found, row: False)
    made = {"full": {0: right, 1: right}, "random masks": {0: ~right, 1: ~right}}
    monkeypatch.setattr(_arena, "gap", lambda *_: Experiment(made, {"coin": np.arange(100) % 2}))
    line, = _arena.worth(found, [("full", "random masks")])
    assert line["withheld because"] == "random masks is not above coin" and line["points"] == pytest.approx(0.6)
    made["random masks"] = {0: right, 1: right}
    line, = _arena.worth(found, [("full", "random masks")])
    assert line["withheld because"] == "" and line["points"] == 0


def test_rows_are_repeated_where_statements_hang_on_them():
    assert _arena.methods("listops") is METHODS and "seeds" not in METHODS["SBM"]
    paths = _arena.methods("pathfinder")
    assert all(options["seeds"] == 1 for options in paths.values())
    assert set(METHODS) - set(paths) == {f"SBM, weight {weight}" for weight in (0.01, 0.001, 0.0001)}


@pytest.mark.parametrize("network", ["shared", "SBM-Transformer"])
def test_rivals_are_those_of_the_code_released_with_sbm_transformer(network, built):
    """Reformer's points attend whole chunks; Nystromformer adds to each place a filter over the 35 around it."""
    assert all(layer.attention.across_buckets for layer in built("image", "Reformer", network=network).encoder.layers)
    for layer in built("image", "Nystromformer", network=network).encoder.layers:
        attention = layer.attention
        x, filters = torch.randn(1, 64, attention.query.in_features), attention.conv
        whole, attention.conv = attention(x), None
        values = torch.nn.functional.pad(attention.value(x)[0].view(64, attention.heads, -1), (0, 0, 0, 0, 17, 17))
        added = torch.stack([torch.einsum("whd,hw->hd", values[i:i + 35], filters).flatten() for i in range(64)])
        torch.testing.assert_close((whole - attention(x))[0], added @ attention.out.weight.T, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("row", ["full", "SBM"])
def test_pictures_leave_the_network_where_it_is(row, data, built, monkeypatch):
    """What figures need is taken on the CPU; the network is tested afterwards on its own device."""
    network, moved = built("image", row), []
    monkeypatch.setattr(type(network), "cpu", lambda self: moved.append(self) or self)
    _arena.drawn(row, network, SETTING["image"], data["image"])
    assert len(moved) == 1 and moved[0] is not network
