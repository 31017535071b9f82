# A rule a data set: built once, into the cache; see data.py. reproduce.py calls it with a file that holds the sets which are
# asked for and not here (`sets`: name -> the notebooks that use it) and the folder of packages that the user gave.
import sys
from pathlib import Path

sys.path.insert(0, str(Path(workflow.basedir)))
import data

PYTHON, HERE = sys.executable, workflow.basedir
PACKAGES = config["packages"]


rule all:
    input:
        [str(data.target(data.SETS[name])) for name in config["sets"]],


for name, users in config["sets"].items():

    rule:
        name:
            name
        output:
            str(data.target(data.SETS[name])),
        params:
            name=name,
            users=",".join(users),
        threads: workflow.cores
        shell:
            "exec {PYTHON:q} {HERE:q}/data.py {params.name} --workers {threads} --users={params.users:q} --packages={PACKAGES:q}"
