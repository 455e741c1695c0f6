"""Parameters of what a config.json names beside the language model: a vision tower, and modules for more tokens."""

from moeblaze_ref.plan.fields import Fields
from moeblaze_ref.plan.parts import Part


def vision_parameters(vision: Fields, d: int) -> int:
    """Parameters of a vision tower, its adapter, and the projection to width ``d``: those of Llama 4.

    Raises
    ------
    ValueError
        If it is another tower, or a field is not what it must be.
    """
    vision.name("model_type", ("llama4_vision_model",), "llama4_vision_model")
    width, inner = vision.size("hidden_size", 768), vision.size("intermediate_size", 5632)
    patch, image = vision.size("patch_size", 14), vision.size("image_size", 448)
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    places = (image // patch) ** 2 + 1
    ends = width + places * width + vision.size("num_channels", 3) * patch**2 * width + 4 * width
    wide, out = vision.size("projector_input_dim", 4096), vision.size("projector_output_dim", 4096)
    adapter = inner * wide + wide * out
    return vision.size("num_hidden_layers", 34) * layer + ends + adapter + vision.size("vision_output_dim", 7680) * d


def next_token_parameters(layer: tuple[Part, ...], d: int, modules: int) -> int:
    """Parameters of modules that predict further tokens (multi-token prediction, DeepSeek-V3).

    Each has a layer, a product of two joined vectors, two norms before it and one after the layer. The embedding and
    the head are the model's.
    """
    return modules * (sum(weight.count for part in layer for weight in part.weights()) + 2 * d * d + 3 * d)
