"""Prints the oldest release of every dependency that was tested, as pip takes them."""

from mega_rl.versions import PACKAGES

if __name__ == "__main__":
    print("megatron-core==0.16.1", *(f"{package.name}=={package.oldest}" for package in PACKAGES))
