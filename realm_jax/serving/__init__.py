"""Serve a trained run over HTTP: JSON, and a web page. Read `app.py` first.

requests (`app`) → a bounded queue (`batching`) → one thread with the devices (`service`) → `inference/`
"""
