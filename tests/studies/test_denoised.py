"""Denoising first: what is hidden, what a network may see of it, which half trains what."""

import math

import pytest
import torch
from sparseattn.lab.classify import cross_entropy
from sparseattn.studies import _arena, _denoised, denoised_image, denoised_listops, names
from sparseattn.studies._denoised import METHODS, ROWS, bits, hide

STUDIES = {"listops": denoised_listops.STUDY, "image": denoised_image.STUDY}
SETTING = {task: study.at("smoke") for task, study in STUDIES.items()}


@pytest.fixture(scope="module")
def data():
    return {task: study.data(SETTING[task]) for task, study in STUDIES.items()}


@pytest.fixture(scope="module")
def built(data):
    def network(task, row):
        torch.manual_seed(0)
        return STUDIES[task].network(row, SETTING[task], data[task]).eval()

    return network


def test_studies_and_settings():
    assert {f"denoised_{task}" for task in STUDIES} <= set(names()) and "_denoised" not in names()
    for task, study in STUDIES.items():
        ours, arena = study.at("cpu"), _arena.study(task).at("cpu")
        assert study.name == f"denoised_{task}" and set(ROWS) <= set(study.rows) and len(ROWS) == 2 * len(METHODS)
        assert ours["steps"] == 2 * arena["steps"] and ours["warm-up"] == 2 * arena["warm-up"]
        assert {name: ours[name] for name in ("data", "sizes", "rates", "batch", "network")} == {
            name: arena[name] for name in ("data", "sizes", "rates", "batch", "network")}


def test_pairs_see_the_same_batches_and_have_the_same_size(data, built):
    study, setting = STUDIES["listops"], SETTING["listops"]
    batches = (study.batches(row, setting, data["listops"], 0, 0) for row in ("full", "full, denoised"))
    first, second = (next(iter(found)) for found in batches)
    assert torch.equal(first["inputs"]["tokens"], second["inputs"]["tokens"]) and first["progress"] == 0
    pair = [list(built("listops", row).parameters()) for row in ("SBM", "SBM, denoised")]
    assert all(torch.equal(one, other) for one, other in zip(*pair, strict=True))


def test_coins_hide_real_tokens_only():
    tokens, lengths = torch.zeros(500, 60, dtype=torch.uint8), torch.full((500,), 40)
    hidden = hide(tokens, lengths, 0.15, torch.Generator().manual_seed(0))
    share, spread = hidden[:, :40].float().mean().item(), math.sqrt(0.15 * 0.85 / 20_000)
    assert not hidden[:, 40:].any() and abs(share - 0.15) < 4 * spread  # false alarm 6e-5
    assert torch.equal(hidden, hide(tokens, lengths, 0.15, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("row", [f"{method}, denoised" for method in METHODS])
@pytest.mark.parametrize("task", list(STUDIES))
def test_hidden_tokens_and_padding_are_not_seen(task, row, data, built):
    net, inputs = built(task, row), data[task]["test"][0]
    tokens, lengths = inputs["tokens"].clone(), inputs["lengths"]
    hidden = hide(tokens, lengths, 0.3, torch.Generator().manual_seed(1))
    other, outside = tokens.clone(), torch.arange(tokens.shape[1]) >= lengths[:, None]
    other[hidden | outside] = 1
    assert not torch.equal(tokens[hidden], other[hidden])

    def restored(tokens):
        torch.manual_seed(0)
        return net.restored(tokens, lengths, hidden)

    assert restored(tokens).shape == (int(hidden.sum()), data[task]["_sizes"][0])
    assert torch.equal(restored(tokens), restored(other))


def test_halves_of_a_training(data, built):
    inputs, labels = data["image"]["train"]
    for row, early in (("full", False), ("full, denoised", True)):
        for progress in (0.0, 0.4, 0.5, 0.9):
            net = built("image", row)
            batch = {"inputs": inputs, "labels": labels, "progress": progress}
            value = _denoised.loss(net, batch, torch.Generator().manual_seed(0))
            value.backward()
            restores = early and progress < 0.5
            expected = (net.surprise(**inputs, generator=torch.Generator().manual_seed(0)) if restores
                        else cross_entropy(net(**inputs), labels))
            torch.testing.assert_close(value, expected)
            assert (net.say.weight.grad is not None) == restores != (net.network.answer[-1].weight.grad is not None)
            assert net.network.tokens.weight.grad.any()


def test_bits_of_a_network_that_knows_nothing(data, built):
    net = built("listops", "full, denoised")
    torch.nn.init.zeros_(net.say.weight), torch.nn.init.zeros_(net.say.bias)
    found = bits(net, data["listops"]["val"][0], 8)
    assert found == pytest.approx(math.log2(data["listops"]["_sizes"][0]), abs=1e-5)


def test_validation_notes_bits_of_rows_that_restore(data, built):
    notes = {row: set(STUDIES["listops"].validate(built("listops", row), SETTING["listops"], data["listops"]))
             for row in ("hard 256", "hard 256, denoised")}
    assert notes["hard 256"] == {"accuracy", "cross-entropy", "density", "multiplier"}
    assert notes["hard 256, denoised"] - notes["hard 256"] == {"bits"}
