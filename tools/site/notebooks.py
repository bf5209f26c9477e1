"""The notebooks of the first steps as pages: text, code, and what each cell printed and drew."""

from __future__ import annotations

import json
from typing import Any

from tools.notebooks import NOTEBOOKS, SCRIPTS
from tools.site.markdown import code_block

INDEX = """# First steps

Three notebooks, from a trained network to a result that matters; each takes seconds on one core. In a checkout:

```
pip install '.[demo]' jupyter
jupyter lab docs/notebooks
```

The same as scripts: `python examples/first_1_wrong_labels.py`, and so on ([examples](../examples/index.md)).

"""


def pages() -> dict[str, str]:
    """One page for each notebook, and their list."""
    made = {f"notebooks/{script.stem}.md": page(script.stem) for script in SCRIPTS}
    links = [f"1. [{text.partition(chr(10))[0].removeprefix('# ')}]({name})" for name, text in titled(made)]
    return {"notebooks/index.md": INDEX + "\n".join(links) + "\n", **made}


def titled(made: dict[str, str]) -> list[tuple[str, str]]:
    """Names in the folder, and texts."""
    return [(path.rpartition("/")[2], text) for path, text in made.items()]


def page(name: str) -> str:
    """One notebook."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    first, *others = (part for cell in cells for part in parts(cell, name))
    about = f"To run it: [{name}.ipynb]({name}.ipynb), in a checkout. [The same as a script](../examples/{name}.md)."
    return "\n\n".join([first, about, *others]) + "\n"


def parts(cell: dict[str, Any], name: str) -> list[str]:
    """A cell and its outputs; a picture is the one that the script draws."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    found = [code_block(source, "python")]
    for output in cell["outputs"]:
        if "text" in output:
            found.append(code_block("".join(output["text"]), "text"))
        else:
            found.append(f"![What it draws](../examples/{name}.svg)")
    return found
