package PVE::Storage;

# Stands for Proxmox' own module in the tests.

use strict;
use warnings;

sub APIVER { return 12 }

1;
