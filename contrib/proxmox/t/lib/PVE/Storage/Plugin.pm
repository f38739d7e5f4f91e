package PVE::Storage::Plugin;

# Stands for the base of Proxmox' storages in the tests: what a storage of Sterna inherits.

use strict;
use warnings;

our @SHARED_STORAGE;

# As in Proxmox: the first free number.
sub find_free_diskname {
    my ($class, $storeid, $scfg, $vmid, $format) = @_;
    my %taken = map { $_->{volid} => 1 } @{ $class->list_images($storeid, $scfg, $vmid) };
    for my $number (0 .. 99) {
        my $name = "vm-$vmid-disk-$number";
        return $name if !$taken{"$storeid:$name"};
    }
    die "no free name\n";
}

1;
