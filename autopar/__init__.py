"""autopar turns a plain PyTorch model into a program for many devices."""
