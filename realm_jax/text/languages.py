"""Languages whose words can be reduced to stems: ISO 639-1 codes and the names of Snowball's stemmers."""

# Those that have both a stemmer and a list of stop words in the libraries that `index/words.py` uses.
LANGUAGES = {
    "da": "danish",
    "de": "german",
    "en": "english",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "nl": "dutch",
    "no": "norwegian",
    "pt": "portuguese",
    "ru": "russian",
    "sv": "swedish",
    "tr": "turkish",
}
PLAIN = "none"  # neither stems nor stop words
