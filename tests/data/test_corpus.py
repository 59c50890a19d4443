"""The default corpus is large, the same every time, and without tests."""

import sys

from sdp.data.corpus import standard_library


def test_standard_library_is_a_deterministic_corpus():
    modules = set(sys.modules)
    corpus = standard_library()
    assert set(sys.modules) - modules == set()
    names = [name for name, _ in corpus.files]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert sum(len(data) for _, data in corpus.files) >= 10_000_000
    assert "argparse.py" in names
    assert "asyncio/tasks.py" in names
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(n.split("/"))]
    assert not [n for n in names if "_sysconfigdata" in n or n.startswith("config-")]
    assert standard_library() == corpus


def test_doc_strings_of_compiled_modules_are_documents():
    files = dict(standard_library().files)
    assert b"math.acosh\n\nReturn the inverse hyperbolic cosine of x." in files["doc-strings/math"]
    assert "doc-strings/builtins" in files
    assert not [name for name in files if name.startswith("doc-strings/_test")]


def test_documents_are_split_by_name():
    corpus = standard_library()
    documents = list(corpus.documents())
    assert [document.split_key for document in documents] == [name for name, _ in corpus.files]
    assert [source.bytes for source in corpus.sources()] == [document.source_bytes for document in documents]
    assert next(corpus.documents(5)) == documents[5]
