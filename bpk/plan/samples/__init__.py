"""Where samples are in each call behind a loss, and which sample a row belongs to.

`placement.py` asks, `hypotheses.py` proposes batch axes, and `attribution.py` tests them: by the form of the graph and
what data pick in this pass (`proofs.py`), or else by gradients (`probing.py`), with the numbers of samples in binary
digits (`decoding.py`). `forms.py` remembers what was found for a form of graph.
"""
