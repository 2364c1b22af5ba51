"""python main.py --cfg conf/config.yaml [key=value ...] [--resume]: train, or continue training."""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback
    from shmap_tp import train

    train.run()
