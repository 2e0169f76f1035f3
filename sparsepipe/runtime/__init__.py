"""The only room that speaks torch.distributed: process groups and how ranks are started."""
