"""Which models vLLM can serve. What differs between their architectures is in the modules named here."""

# The minor version of vLLM that the tests run on. Its interfaces change from one to the next.
TESTED = "0.32"

# Model type to the module and the class that run it.
SERVED = {
    "rwkv5": "subquad_vllm.rwkv:RwkvForCausalLM",
    "rwkv6": "subquad_vllm.rwkv:FinchForCausalLM",
    "rwkv7": "subquad_vllm.rwkv:GooseForCausalLM",
    "raven": "subquad_vllm.raven:RavenForCausalLM",
    "gecko": "subquad_vllm.gecko:GeckoForCausalLM",
}
# The same for models of that type with softmax attention in some blocks.
HYBRID = {"raven": "subquad_vllm.raven:RavenHybridForCausalLM"}
# Model type to why vLLM cannot serve it.
REFUSED = {
    "avey": "it keeps the embedding of every token of a text, and vLLM has no memory that grows in this way",
    "avey-b": "it is an encoder, which reads a text at once and keeps no state",
    "visual_rwkv": "this plug-in has no processor of images for it",
}


def hybrid_name(name: str) -> str:
    """Under which name vLLM knows a class of models with softmax attention in some blocks."""
    return name if "HybridFor" in name else name.replace("For", "HybridFor", 1)
