"""The suite that every adapter runs, third parties' too.

    from superfluid_workerd.conformance import (
        AdapterContract, Case, EmbeddingContract, RuntimeContract, TokenizerContract,
    )

    @pytest.fixture(scope="module")
    def case(tmp_path_factory):
        return Case(adapter=MyAdapter(), model=path, folder=tmp_path_factory.mktemp("case"))

    class TestRuntime(RuntimeContract): ...       # of a model that gives text
    class TestEmbedding(EmbeddingContract): ...   # of one that gives embeddings
    class TestTokenizer(TokenizerContract): ...
    class TestAdapter(AdapterContract): ...

Each class needs pytest and the fixture `case`; each test opens the model for itself and closes it.
The model should be small, with a context of 32 tokens or more and 16 or more in a step.
"""

from superfluid_workerd.conformance.adapter import AdapterContract
from superfluid_workerd.conformance.case import Case, Opened
from superfluid_workerd.conformance.embedding import EmbeddingContract
from superfluid_workerd.conformance.runtime import RuntimeContract
from superfluid_workerd.conformance.tokenizer import TokenizerContract

__all__ = [
    "AdapterContract",
    "Case",
    "EmbeddingContract",
    "Opened",
    "RuntimeContract",
    "TokenizerContract",
]
