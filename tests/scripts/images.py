"""Trains a small network on images, written as DeepSpeed's CIFAR example is. Under sdp one call
changes: ``deepspeed.initialize``.
"""

import argparse

import deepspeed
import torch
from torch import nn
from torch.utils.data import TensorDataset


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


class Net(nn.Module):
    def __init__(self, channels=6, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(4))
        self.head = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def add_argument():
    parser = argparse.ArgumentParser(description="images")
    parser.add_argument("-e", "--epochs", default=3, type=int)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--checkpoint", required=True)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def images(count=128):
    """Noise around one of four pictures."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (count,), generator=generator)
    pictures = torch.randn(4, 3, 8, 8, generator=generator)
    return TensorDataset(pictures[labels] + 0.5 * torch.randn(count, 3, 8, 8, generator=generator), labels)


def main(args):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=images()
    )
    local_device, local_rank = model_engine.device, model_engine.local_rank
    target_dtype = torch.bfloat16 if model_engine.bfloat16_enabled() else torch.float32
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        running_loss, batches = 0.0, 0
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            outputs = model_engine(inputs.to(target_dtype))
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
            running_loss, batches = running_loss + loss.item(), batches + 1
        losses.append(running_loss / batches)
        if local_rank in (0, -1):
            print(f"epoch {epoch} loss {losses[-1]:.4f} after {model_engine.global_steps} steps", flush=True)
    model_engine.save_checkpoint(args.checkpoint, tag="end", client_state={"epochs": args.epochs})
    steps = model_engine.global_steps
    path, client_state = model_engine.load_checkpoint(args.checkpoint, tag="end")
    assert path is not None and client_state["epochs"] == args.epochs and model_engine.global_steps == steps
    model_engine.eval()
    with torch.no_grad():
        model_engine(inputs.to(target_dtype))
    return {
        "losses": losses,
        "train_batch_size": model_engine.train_batch_size(),
        "micro_batch": model_engine.train_micro_batch_size_per_gpu(),
        "accumulation": model_engine.gradient_accumulation_steps(),
        "rank": model_engine.global_rank,
        "local_rank": model_engine.local_rank,
        "norm": model_engine.get_global_grad_norm(),
        "lr": model_engine.get_lr(),
        "steps": steps,
        "is_boundary": model_engine.is_gradient_accumulation_boundary(),
        "parameters": sum(p.numel() for p in model_engine.module.parameters()),
    }


if __name__ == "__main__":
    main(add_argument())
