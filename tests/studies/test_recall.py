"""The study of recall: what rows change in a network, what rules see, how a sequence is scored, what heads chose."""

import pytest
import torch

import sparseattn
from sparseattn.samsa.models import inference_modes, sampling_layers
from sparseattn.studies.recall import KINDS, METHODS, ROWS, STUDY, TASKS, _chosen

SETTING = STUDY.at("smoke")


def backward(net, tokens):
    net.train()
    torch.manual_seed(1)
    net(tokens).square().sum().backward()
    return net


def test_every_attention_has_a_row():
    """One that is new in the registry wants a row, at the end of METHODS."""
    assert {options.get("attention", "samsa") for options in METHODS.values()} == set(sparseattn.attentions())
    assert {options["task"] for options in ROWS.values()} == set(TASKS)


@pytest.mark.parametrize("name", METHODS)
def test_rows_answer(name, data, built):
    net, tokens = built(f"recall: {name}"), data["recall"]["test"][0]
    out = net(tokens)
    assert out.shape == (*tokens.shape[:2], SETTING["values"]) and out.isfinite().all() and net.task == "recall"


def test_multipliers_start_as_rows_say_and_move_as_fast(data, built):
    starts = {"hard 8": 1, "hard 8, from 0": 0, "hard 8, from 0.1": 0.1, "hard 8, from 0, own rate": 0, "full": 1}
    for name, start in starts.items():
        assert built(f"needle: {name}").encoder.alpha.item() == pytest.approx(start)
    moved = []
    for name in ("hard 8, from 0", "hard 8, from 0, own rate"):
        net = backward(built(f"needle: {name}"), data["needle"]["train"][0])
        torch.optim.Adam(net.parameters(), 1e-3).step()
        moved.append(abs(net.encoder.alpha.item()))
    assert moved[0] == pytest.approx(1e-3, rel=1e-3) and moved[1] == pytest.approx(15e-3, rel=1e-3)


def test_what_learns_by_the_scores(data, built):
    """The scorer in one row, the tokens alone in the second, nothing in the third."""
    tokens = data["needle"]["train"][0]
    rows = ("hard 8", "hard 8, fixed scores", "hard 8, no gradient")
    learned, fixed, detached = (backward(built(f"needle: {row}"), tokens) for row in rows)
    assert sampling_layers(learned)[0].importance.score.weight.grad.abs().max() > 0
    for net in (fixed, detached):
        layer = sampling_layers(net)[0]
        assert layer.support_scores.grad is None and all(p.grad is None for p in layer.importance.parameters())
    torch.testing.assert_close(fixed.answer.weight.grad, detached.answer.weight.grad, rtol=1e-4, atol=1e-3)
    assert (fixed.keys.weight.grad - detached.keys.weight.grad).abs().max() > 1e-4 * fixed.keys.weight.grad.abs().max()


def test_modes(data, built):
    assert inference_modes(built("needle: soft 8")) == ["mixed", "top-k", "noise"]
    assert inference_modes(built("needle: hard 8, no gradient")) == ["top-k", "noise"]
    found = STUDY.test(built("needle: soft 8"), SETTING, data)
    assert list(found) == ["test", "top-k", "noise"]
    assert {y.shape for y in found.values()} == {(SETTING["sequences tested"],)}
    assert all((0 <= y).all() and (y <= 1).all() for y in found.values())


def test_rules_by_hand(data):
    tokens, labels = data["recall"]["test"]
    known, known_labels = data["recall"]["train"]
    for row, kept in (("commonest value", lambda k, v: v > 0), ("commonest fact", lambda k, v: (v > 0) & (k > 0))):
        def common(sequence, kept=kept):
            counts = torch.bincount(sequence[kept(*sequence.unbind(-1)), 1], minlength=SETTING["values"] + 1)
            return int(counts.argmax())
        votes = {}
        for sequence, own in zip(known, known_labels, strict=True):
            votes.setdefault(common(sequence), []).extend(own[own >= 0].tolist())
        every = torch.bincount(known_labels[known_labels >= 0]).argmax()
        right = []
        for sequence, own in zip(tokens, labels, strict=True):
            of = votes.get(common(sequence))
            said = torch.bincount(torch.tensor(of)).argmax() if of else every
            right.append((own[own >= 0] == said).double().mean().item())
        found = STUDY.floor(f"recall: {row}", SETTING, data, 0)
        assert found["test"].tolist() == pytest.approx(right)


def test_what_heads_chose():
    tokens = torch.tensor([[[1, 2], [1, 0], [0, 2], [0, 1]]])
    assert len(KINDS) == 4
    assert _chosen(tokens, torch.tensor([[[0, 1], [0, 9]]])).tolist() == [0.5, 0.25, 0.0, 0.25]
    assert _chosen(tokens, torch.tensor([[[2, 3]]])).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_penalty_is_in_the_loss_of_its_row_only(data, built):
    tokens, labels = data["needle"]["train"]
    losses = []
    for name in ("SBM, coins", "SBM, weight 0.1"):
        torch.manual_seed(3)
        losses.append(STUDY.loss(built(f"needle: {name}"), {"inputs": tokens, "labels": labels}, None).item())
    assert 0.001 < losses[1] - losses[0] < 0.1
