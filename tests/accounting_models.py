"""Models that transformers builds, on the meta device, beside their configs as saving would write them."""

import warnings
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from moeffn.accounting.families_encoders import ENCODERS

ORDER = (AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)


def build(config):
    """The model with its head, of an encoder without."""
    for kind in (AutoModel,) if config.model_type in ENCODERS else ORDER:
        if type(config) in kind._model_mapping:
            with torch.device("meta"), ExitStack() as stack:
                for plain in (nn.Linear, nn.Embedding):  # nothing to initialise; trying to takes a quarter of the time
                    stack.enter_context(patch.object(plain, "reset_parameters", lambda self: None))
                return kind.from_config(config)
    raise LookupError(f"transformers builds no model from {type(config).__name__}")


def whole(name, changes):
    """The live model and its config in full."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(name, **changes)
        return build(config), config.to_dict()
