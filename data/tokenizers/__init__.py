"""Tokenizers: the three kinds, their names, and how they are trained and loaded."""

from .kinds import END_OF_TEXT as END_OF_TEXT
from .kinds import SPACE_SYMBOL as SPACE_SYMBOL
from .kinds import BytesTokenizer as BytesTokenizer
from .kinds import HuggingFaceTokenizer as HuggingFaceTokenizer
from .kinds import SentencePieceTokenizer as SentencePieceTokenizer
from .kinds import Tokenizer as Tokenizer
from .load import DEFAULT_VOCAB_SIZE as DEFAULT_VOCAB_SIZE
from .load import check_request as check_request
from .load import load_encoder as load_encoder
from .load import load_tokenizer as load_tokenizer
from .load import make_tokenizer as make_tokenizer
from .load import ready_made as ready_made
from .load import request_of as request_of
from .load import tokenizer_from_spec as tokenizer_from_spec
from .load import train_sentencepiece as train_sentencepiece
