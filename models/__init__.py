"""The models that a configuration can name: LLaMA, ResNet-18, Swin-T and models of transformers."""
