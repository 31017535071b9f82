"""Package metadata lives in settings.ini; this file only hands it to setuptools."""
import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
meta = config["DEFAULT"]
readme = (here / "README.md").read_text(encoding="utf-8")
for kind, link in (("raw", r"(!\[[^]]*\]\()"), ("blob", r"((?<!!)\[[^]]*\]\()")):  # elsewhere pictures and pages are found by their address
    readme = re.sub(link + r"(?!https?:|#)", rf"\1{meta['git_url']}/{kind}/{meta['branch']}/", readme)
extras = {key.removesuffix("_requirements"): value.split()
          for key, value in meta.items() if key.endswith("_requirements")}

setup(
    name=meta["lib_name"],
    version=meta["version"],
    description=meta["description"],
    long_description=readme,
    long_description_content_type="text/markdown",
    author=meta["author"],
    author_email=meta["author_email"],
    keywords=meta["keywords"],
    url=meta["git_url"],
    project_urls={name: f"{meta['git_url']}/blob/{meta['branch']}/{file}"
                  for name, file in (("Changelog", "CHANGELOG.md"), ("Notebooks", "nbs/index.ipynb"))},
    classifiers=["Development Status :: 4 - Beta", "Intended Audience :: Science/Research", "Programming Language :: Python :: 3",
                 "Topic :: Scientific/Engineering :: Artificial Intelligence", "Typing :: Typed"],
    license="Apache-2.0",
    packages=find_packages(include=[meta["lib_path"], meta["lib_path"] + ".*"]),
    package_data={"sparseattn": ["py.typed", "csrc/*.c", "csrc/*.h"], "sparseattn.data": ["files/*.npz", "files/*.txt"]},
    python_requires=">=" + meta["min_python"],
    install_requires=meta["requirements"].split(),
    extras_require=extras,
    entry_points={"nbdev": [f"{meta['lib_path']}={meta['lib_path']}._modidx:d"]},
    zip_safe=False,
)
