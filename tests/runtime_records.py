"""Records as vLLM and SGLang write them."""

import base64
import io
import json

import numpy as np
import torch

E, K = 8, 2


def chosen(tokens, layers, seed=0):
    """Choices (tokens, layers, K) of E experts, all K distinct."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, E)), axis=2)[:, :, :K]


def of_vllm(lengths=(5, 7), dense=(0, 3)):
    """Routed experts of requests through 5 layers, in uint8 as vLLM gives them, and their choices alone."""
    real = [chosen(length, 5 - len(dense), seed) for seed, length in enumerate(lengths)]
    full = [np.zeros((length, 5, K), np.uint8) for length in lengths]
    for array, ids in zip(full, real, strict=True):
        array[:, np.setdiff1d(np.arange(5), dense)] = ids
    return full, np.concatenate(real)


def base64_of(array):
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def saved_as_npz(path, requests):
    np.savez(path, *requests)


def saved_as_responses(path, requests):
    lines = [json.dumps({"choices": [{"text": "", "routed_experts": base64_of(array)}]}) for array in requests]
    path.write_text("\n".join(lines) + "\n")


def of_sglang():
    """Two prefills and a decode of SGLang's recorder, 3 layers of which the first has no experts; what they chose.

    Ids are of places, 9 of them with expert 1 twice. The first pass has zeros where nothing was recorded, as the
    recorder's buffer begins with them, and the last token of the second is padding.
    """
    logical = np.stack([np.random.default_rng(layer).permutation([*range(E), 1]) for layer in range(3)])
    real = chosen(9, 2, seed=5)
    places = np.stack([[np.flatnonzero(logical[l + 1] == e)[0] for e in real[:, l].ravel()] for l in range(2)])
    ids = np.zeros((3, 9, 8), np.int32)
    ids[1:, :, :K] = places.reshape(2, 9, K)
    second = np.full((3, 4, 8), -1, np.int32)
    second[1:, :3, :K] = ids[1:, 6:, :K]
    passes = [(ids[:, :6], [2, 4]), (second, [3, 1]), (ids[:, :5], None)]
    records = [
        {"forward_pass_id": n, "rank": 0, "topk_ids_of_layer": torch.from_numpy(ids.copy()), "extend_seq_lens": lengths}
        for n, (ids, lengths) in enumerate(passes)
    ]
    return {"records": records, "last_physical_to_logical_map": torch.from_numpy(logical)}, real
