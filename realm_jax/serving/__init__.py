"""A trained run as a service: HTTP with JSON, and a page. Read `app.py` first.

requests (`app`) → a bounded queue (`batching`) → one thread with the devices (`service`) → `inference/`
"""
