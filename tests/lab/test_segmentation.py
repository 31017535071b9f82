"""Scores of segmentations: against scikit-learn, and against sets of points written out."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from sparseattn.lab.segmentation import confusion_matrix, part_iou, segmentation_scores


def draw(seed, classes, shape, right=0.6, used=None):
    """Labels, and answers that are right with a probability; only the first `used` labels occur."""
    g = torch.Generator().manual_seed(seed)
    labels, other = (torch.randint(0, used or classes, shape, generator=g) for _ in range(2))
    return torch.where(torch.rand(shape, generator=g) < right, labels, other), labels


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("classes, shape", [(2, (50,)), (5, (3, 40)), (13, (2, 7, 300))])
def test_equals_scikit_learn(seed, classes, shape):
    predicted, labels = draw(seed, classes, shape)
    scores = segmentation_scores(confusion_matrix(predicted, labels, classes))
    pair = labels.flatten().numpy(), predicted.flatten().numpy()
    each = dict(average=None, labels=range(classes), zero_division=np.nan)
    np.testing.assert_allclose(scores.iou, sk.jaccard_score(*pair, **each | {"zero_division": 0}), rtol=1e-12)
    np.testing.assert_allclose(scores.accuracy, sk.recall_score(*pair, **each), rtol=1e-12)
    assert np.isclose(scores.mean_accuracy, sk.balanced_accuracy_score(*pair))
    assert np.isclose(scores.overall, sk.accuracy_score(*pair))
    assert np.isclose(scores.mean_iou, sk.jaccard_score(*pair, average="macro"))


@pytest.mark.parametrize("seed", range(4))
def test_absent_labels_against_sets(seed):
    predicted, labels = draw(seed, 7, (3, 40), used=6)  # label 6 occurs nowhere
    labels[labels == 5] = 0  # label 5 is predicted, never true
    predicted[0, 0] = 5
    scores = segmentation_scores(confusion_matrix(predicted, labels, 7))
    for k in range(7):
        a, b = predicted == k, labels == k
        either = int((a | b).sum())
        assert np.isclose(scores.iou[k], int((a & b).sum()) / either if either else np.nan, equal_nan=True)
        found = int((a & b).sum()) / int(b.sum()) if b.any() else np.nan
        assert np.isclose(scores.accuracy[k], found, equal_nan=True)
    assert scores.iou[6].isnan() and scores.accuracy[5].isnan() and scores.iou[5] == 0
    assert np.isclose(scores.mean_iou, np.nanmean(scores.iou)) and np.isclose(
        scores.mean_accuracy, np.nanmean(scores.accuracy)
    )


def test_confusions_add_and_masks_leave_out():
    predicted, labels = draw(0, 4, (2, 50))
    mask = torch.rand(2, 50, generator=torch.Generator().manual_seed(1)) < 0.7
    whole = confusion_matrix(predicted, labels, 4)
    assert whole.dtype == torch.int64 and whole.sum() == 100
    assert torch.equal(whole, sum(confusion_matrix(p, t, 4) for p, t in zip(predicted, labels, strict=True)))
    assert torch.equal(whole.T, confusion_matrix(labels, predicted, 4))
    kept = confusion_matrix(predicted, labels, 4, mask)
    assert kept.sum() == mask.sum() and torch.equal(kept, confusion_matrix(predicted[mask], labels[mask], 4))
    labels[~mask] = -1  # what is not counted may hold anything
    predicted[~mask] = 99
    assert torch.equal(kept, confusion_matrix(predicted, labels, 4, mask))


def test_nothing_to_count():
    nothing = torch.zeros(0, dtype=torch.long)
    assert torch.equal(confusion_matrix(nothing, nothing, 3), torch.zeros(3, 3, dtype=torch.long))
    mask = torch.zeros(4, dtype=torch.bool)
    assert confusion_matrix(torch.arange(4), torch.arange(4), 4, mask).sum() == 0
    with pytest.raises(ValueError, match="positive"):
        segmentation_scores(torch.zeros(3, 3, dtype=torch.long))


def test_the_commonest_label():
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    floor = segmentation_scores(confusion_matrix(torch.zeros_like(labels), labels, 3))
    assert floor.overall == 0.6 and np.isclose(floor.mean_accuracy, 1 / 3) and np.isclose(floor.mean_iou, 0.2)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_any_integers(dtype):
    predicted, labels = draw(3, 5, (200,))
    assert torch.equal(
        confusion_matrix(predicted.to(dtype), labels.to(dtype), 5), confusion_matrix(predicted, labels, 5)
    )


def test_refusals_of_labels():
    two = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="predicted: expected 0 to 1, got 0 to 2"):
        confusion_matrix(torch.tensor([0, 2]), two, 2)
    with pytest.raises(ValueError, match="labels: expected 0 to 1, got -1"):
        confusion_matrix(two, torch.tensor([0, -1]), 2)
    with pytest.raises(ValueError, match="labels"):
        confusion_matrix(torch.tensor([0]), two, 2)
    with pytest.raises(ValueError, match="predicted"):
        confusion_matrix(two.float(), two, 2)
    with pytest.raises(ValueError, match="mask"):
        confusion_matrix(two, two, 2, two)
    for wrong in (-torch.eye(2).long(), torch.ones(2, 3, dtype=torch.long), torch.ones(2, 2), [[1]]):
        with pytest.raises(ValueError, match="confusion"):
            segmentation_scores(wrong)


SETS = [(0, 1), (2, 3, 4), (5, 6)]


def shapes(seed, count=12, points=30):
    """Shapes of the first two of three classes, with answers."""
    g = torch.Generator().manual_seed(seed)
    first, size = torch.tensor([0, 2, 5]), torch.tensor([2, 3, 2])
    labels = torch.randint(0, 2, (count,), generator=g)
    labels[:2] = torch.tensor([0, 1])
    parts = first[labels][:, None] + torch.randint(0, 10, (count, points), generator=g) % size[labels][:, None]
    other = torch.randint(0, 7, (count, points), generator=g)
    predicted = torch.where(torch.rand(count, points, generator=g) < 0.6, parts, other)
    parts[0] = predicted[0] = first[labels[0]]  # one part only, found: score 1
    return predicted, parts, labels


@pytest.mark.parametrize("seed", range(3))
def test_part_iou_against_sets(seed):
    predicted, parts, labels = shapes(seed)
    scores = part_iou(predicted, parts, labels, SETS)
    for i in range(len(parts)):
        ious = []
        for p in SETS[int(labels[i])]:
            a, b = predicted[i] == p, parts[i] == p
            ious.append(float((a & b).sum() / (a | b).sum()) if (a | b).any() else 1.0)
        assert np.isclose(scores.shapes[i], np.mean(ious))
    assert scores.shapes[0] == 1 and scores.classes[2].isnan()
    means = [float(scores.shapes[labels == k].mean()) for k in (0, 1)]
    assert np.isclose(scores.class_mean, np.mean(means)) and np.isclose(scores.instance_mean, scores.shapes.mean())


def test_part_iou_against_scikit_learn():
    """On shapes that have all their parts the score is the macro Jaccard score over them."""
    g = torch.Generator().manual_seed(5)
    parts = torch.arange(60).remainder(3).expand(4, 60)
    predicted = torch.where(torch.rand(4, 60, generator=g) < 0.7, parts, torch.randint(0, 3, (4, 60), generator=g))
    scores = part_iou(predicted, parts, torch.zeros(4, dtype=torch.long), [(0, 1, 2)])
    expected = [sk.jaccard_score(t, p, average="macro") for t, p in zip(parts, predicted, strict=True)]
    np.testing.assert_allclose(scores.shapes, expected, rtol=1e-12)


def test_padding_does_not_count():
    predicted, parts, labels = shapes(7)
    mask = torch.arange(30) < torch.randint(5, 31, (12, 1), generator=torch.Generator().manual_seed(0))
    padded = part_iou(predicted.where(mask, 99), parts.where(mask, -1), labels, SETS, mask)
    for i in range(12):
        own = mask[i]
        alone = part_iou(predicted[i : i + 1, own], parts[i : i + 1, own], labels[i : i + 1], SETS)
        assert np.isclose(padded.shapes[i], alone.shapes[0])


def test_refusals_of_parts():
    predicted, parts, labels = shapes(1)
    with pytest.raises(ValueError, match="part outside"):
        part_iou(predicted, parts, 1 - labels, SETS)
    with pytest.raises(ValueError, match="labels: expected 0 to 2, got"):
        part_iou(predicted, parts, labels + 3, SETS)
    with pytest.raises(ValueError, match="labels: expected"):
        part_iou(predicted, parts, labels[:-1], SETS)
    with pytest.raises(ValueError, match="predicted"):
        part_iou(predicted[:, :-1], parts, labels, SETS)
    with pytest.raises(ValueError, match="mask"):
        part_iou(predicted, parts, labels, SETS, parts)
    with pytest.raises(ValueError, match="mask: a shape has no point that counts"):
        part_iou(predicted, parts, labels, SETS, (torch.arange(len(parts)) > 0)[:, None].expand(parts.shape))
    with pytest.raises(ValueError, match="parts"):
        part_iou(predicted[:0], parts[:0], labels[:0], SETS)


def test_import_does_not_need_scikit_learn():
    code = "import sys; sys.modules['sklearn'] = None\nimport torch\nfrom sparseattn.lab import segmentation as s\n"
    code += "x = torch.tensor([0])\ntry:\n    s.confusion_matrix(x, x, 1)\nexcept ImportError as e:\n    print(e)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "scikit-learn" in found.stdout
