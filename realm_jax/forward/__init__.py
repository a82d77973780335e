"""The forward pass of a step: retrieve, score, read. Of a masked sentence (`masked.py`), and of a question
(`question.py`), by the same search (`search.py`) and with the same reading of spans (`reading.py`); what all are given
stands in `context.py`.

Pure functions of (context, parameters, batch, index), shared by training, evaluation and inspection: losses, answers,
the report and `realm inspect` are computed from what they return. A refreshed index is new data, not a new program.
`key` None turns dropout off. Read next: `models/likelihood.py` for the probabilities, `tasks/realm.py` and
`tasks/qa.py` for the losses.
"""
