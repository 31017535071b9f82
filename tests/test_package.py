"""The package as a whole: what importing it costs, every mechanism in the encoder, every example in a docstring."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

import sparseattn

matplotlib.use("Agg")
ROOT = Path(__file__).parent.parent
EXTRAS = ["matplotlib", "pandas", "seaborn", "sklearn", "tqdm", "papermill", "nbdev", "pythia8", "IPython"]
MODULES = [m.name for m in pkgutil.walk_packages(sparseattn.__path__, "sparseattn.") if not m.name.endswith("_modidx")]


REFUSE = """
import sys, torch, torch._dynamo, scipy, jaxtyping
tried, extras = [], set(sys.argv[1:])
class Refuse:
    def find_spec(name, path=None, target=None):
        tried.extend({name} & extras)
sys.meta_path.insert(0, Refuse)
for name in [m for m in sys.modules if m.split(".")[0] in extras]:
    del sys.modules[name]
import sparseattn
print(tried)
"""


def test_import_loads_no_extra():
    """Seen from the import system: torch itself loads tqdm, and looks for others, where they are installed."""
    done = subprocess.run([sys.executable, "-c", REFUSE, *EXTRAS], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_layers_need_torch_numpy_and_scipy_only():
    """Where jaxtyping is not installed, annotations name the array without its shape."""
    code = """import sys; sys.modules["jaxtyping"] = None
import sparseattn, torch, typing
print(sparseattn.HEPTAttention(8, heads=2, coord_dims=2)(torch.randn(1, 40, 8), torch.rand(1, 40, 2)).shape)
print(typing.get_type_hints(sparseattn.HEPTAttention.forward)["x"])"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["torch.Size([1, 40, 8])", str(torch.Tensor)], done.stderr


def test_public_names():
    assert {"Encoder", "HEPTAttention", "SBMAttention", "SampledAttention", "attentions"} <= set(sparseattn.__all__)
    assert all(hasattr(sparseattn, name) for name in sparseattn.__all__)
    names = sparseattn.attentions()
    assert {"dense", "hept", "sbm"} <= set(names) and names == sorted(set(names))


# what a mechanism must be told; a window over all points makes random patterns full ones
NEEDS = {"hept": dict(coord_dims=3), "linformer": dict(max_length=21), "sbm": dict(window=64)}
NEEDS["sampled"] = NEEDS["sbm"]
NEEDS |= dict.fromkeys(("flatformer_k", "flt", "performer_k", "point_transformer", "smyrf_k"), dict(coord_dims=3))


@pytest.mark.parametrize("name", sparseattn.attentions())
def test_every_mechanism_runs_in_the_encoder_with_a_mask(name):
    torch.manual_seed(0)
    x, coords, mask = torch.randn(2, 21, 16), torch.rand(2, 21, 3), torch.arange(21) < torch.tensor([[21], [9]])
    encoder = sparseattn.Encoder(16, 2, 4, attention=name, **NEEDS.get(name, {})).eval()
    out = encoder(x, coords, mask)
    assert out.shape == x.shape and out.isfinite().all()
    torch.testing.assert_close(out[1:, :9], encoder(x[1:, :9], coords[1:, :9]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    """In the repository's folder, as a reader would run them; seeded, so that a failure can be repeated."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    found = doctest.testmod(importlib.import_module(name), report=False)
    assert found.failed == 0
    plt.close("all")


TYPED = """
import doctest, sys
from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is taken where a float is asked for
sys.modules["checked"] = type(sys)("checked")
sys.modules["checked"].function = checked
with install_import_hook("sparseattn", "checked.function"):
    import importlib
    modules = [importlib.import_module(name) for name in sys.argv[1:]]
sys.exit(any([doctest.testmod(module).failed for module in modules]))
"""


def test_examples_with_annotations_checked():
    """What a function is given and returns in the examples is what its annotations say, inside of the package too."""
    run = subprocess.run([sys.executable, "-c", TYPED, *MODULES], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_code_in_the_readme(monkeypatch):
    """One block after the other, with fewer points and a backend of `torch.compile` that needs no compiler."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compiled(module, backend="aot_eager", fullgraph=True))
    text, names = (ROOT / "README.md").read_text(encoding="utf-8"), {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block.replace("60_000", "600"), names)
    assert names["loss"].isfinite() and 0 < names["infos"][0].density < 1
    torch.compiler.reset()


LIBRARY = [m for m in MODULES if m.count(".") == 2 and m.split(".")[1] in ("core", "hept", "sbm", "sampled")]


@pytest.mark.parametrize("name", LIBRARY)
def test_library_functions_show_an_example(name):
    module = importlib.import_module(name)
    functions = [f for f in map(vars(module).get, module.__all__) if inspect.isfunction(f)]
    assert not [f.__name__ for f in functions if ">>>" not in (f.__doc__ or "")]


def test_example_of_the_package():
    assert doctest.testmod(sparseattn, report=False) == (0, 4)
