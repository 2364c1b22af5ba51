from shmap_tp.hardware.libtpu import describe_machine_without_tpu

describe_machine_without_tpu()
