"""python main.py --cfg conf/config.yaml [key=value ...] [--resume]: train, or continue training."""

from shmap_tp import train

if __name__ == "__main__":
    train.run()
