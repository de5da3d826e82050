/* start.S: from reset to firmware_main. One core, at EL1, as QEMU's board "virt" starts it, caches clean and off. */

    .section .text.start, "ax"
    .global _start
_start:
    msr daifset, #15                    // no interrupts
    ldr x0, =vectors
    msr vbar_el1, x0
    mov x0, #(3 << 20)                  // CPACR_EL1.FPEN: floating point and NEON are not trapped
    msr cpacr_el1, x0
    isb
    msr fpcr, xzr
    msr tpidr_el1, xzr                  // no exception yet
    msr tpidr_el0, xzr                  // no thread-local storage: who looks for it faults at address 0

    ldr x0, =bss_begin
    ldr x1, =bss_end
1:  stp xzr, xzr, [x0], #16
    cmp x0, x1
    b.lo 1b
    ldr x0, =stack_begin                // so that it can be seen afterwards how deep it went
    ldr x1, =stack_end
2:  stp xzr, xzr, [x0], #16
    cmp x0, x1
    b.lo 2b

    // Memory: addresses are the physical ones. With the MMU off all would be device memory, where access must be aligned.
    ldr x0, =0xff00                     // MAIR_EL1: attribute 0 is device memory, attribute 1 normal, cached
    msr mair_el1, x0
    ldr x0, =level1
    msr ttbr0_el1, x0
    ldr x0, =0x200803519                // TCR_EL1: 39-bit addresses, 4 KiB granules, cached walks, no TTBR1, 40-bit physical
    msr tcr_el1, x0
    tlbi vmalle1
    dsb sy
    isb
    ldr x0, =0x30d01805                 // SCTLR_EL1: MMU and caches on, unaligned access allowed (A = 0)
    msr sctlr_el1, x0
    isb

    ldr x0, =stack_end
    mov sp, x0
    bl firmware_main
    b .                                 // firmware_main does not return

/* An exception of any kind ends the program: firmware_trap(vector, ESR, ELR, FAR), on a stack of its own. One in there, too, by
 * SYS_EXIT_EXTENDED with a status of 3. */
    .balign 128
trap:
    mrs x1, tpidr_el1
    cbnz x1, 1f
    mov x1, #1
    msr tpidr_el1, x1
    ldr x1, =trap_stack_end
    mov sp, x1
    mrs x1, esr_el1
    mrs x2, elr_el1
    mrs x3, far_el1
    bl firmware_trap
    b .
1:  mov x0, #0x20
    ldr x1, =trapped_twice
    hlt #0xf000
    b .

    .balign 2048
vectors:
    .set vector, 0
    .rept 16
    .balign 128
    mov x0, #vector
    b trap
    .set vector, vector + 1
    .endr
    .balign 128

/* uint64_t firmware_semihosting(uint64_t operation, const void *argument): ask the debugger, or QEMU in its place. */
    .text
    .global firmware_semihosting
firmware_semihosting:
    hlt #0xf000
    ret

/* What must end in firmware_trap: a system call, an instruction that does not exist, a null pointer, too deep a stack. */
    .global firmware_system_call, firmware_undefined, firmware_null, firmware_deep
firmware_system_call:
    svc #0
    ret
firmware_undefined:
    udf #0
    ret
firmware_null:
    mov x0, xzr
    ldr x0, [x0]
    ret
firmware_deep:
    stp x29, x30, [sp, #-256]!
    bl firmware_deep
    ldp x29, x30, [sp], #256
    ret

    .section .rodata
    .balign 8
trapped_twice:
    .quad 0x20026, 3

/* Page tables. Of the first GiB only the UART's 2 MiB are there (device memory, not to be executed), so that null pointers
 * fault; of the second, RAM's first, all but the 2 MiB below the stack. Two more follow, as far as there is RAM. It is normal,
 * cached, shareable memory. */
    .section .rodata.tables, "a"
    .balign 4096
level1:
    .quad level2_devices + 3
    .quad level2_memory + 3
    .quad 0x080000705
    .quad 0x0c0000705
    .fill 508, 8, 0
level2_devices:
    .fill 72, 8, 0
    .quad 0x0060000009000401
    .fill 439, 8, 0
level2_memory:
    .quad 0x40000705
    .quad 0
    .set address, 0x40400705
    .rept 510
    .quad address
    .set address, address + 0x200000
    .endr
