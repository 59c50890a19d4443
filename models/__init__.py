"""The models that a configuration can name: LLaMA, ResNet-18 and Swin-T."""
