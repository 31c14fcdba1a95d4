"""Decoder layers with LoRA for training on a GPU: one autograd function a layer, its backward written out."""
